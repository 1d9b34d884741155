#include "loader/args.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

int arg_u64(const char *text, uint64_t lo, uint64_t hi, uint64_t *out)
{
    char *end;
    if (*text < '0' || *text > '9')
        return -1;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno || *end || v < lo || v > hi)
        return -1;
    *out = v;
    return 0;
}

int arg_double(const char *text, double lo, double hi, double *out)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v) || v < lo || v > hi)
        return -1;
    *out = v;
    return 0;
}
