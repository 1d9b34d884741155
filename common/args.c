#include "common/args.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

int arg_u64(const char *text, uint64_t lo, uint64_t hi, uint64_t *out, struct err *e)
{
    char *end = NULL;
    errno = 0;
    unsigned long long v = *text >= '0' && *text <= '9' ? strtoull(text, &end, 10) : 0;
    if (errno || !end || *end || v < lo || v > hi)
        return err_set(e, ERR_INPUT, "%s: a whole number from %llu to %llu expected", text,
            (unsigned long long)lo, (unsigned long long)hi);
    *out = v;
    return 0;
}

int arg_int(const char *text, int lo, int hi, int *out, struct err *e)
{
    uint64_t n = 0;
    int rc = arg_u64(text, (uint64_t)lo, (uint64_t)hi, &n, e);
    if (rc == 0)
        *out = (int)n;
    return rc;
}

int arg_double(const char *text, double lo, double hi, double *out, struct err *e)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v) || v < lo || v > hi)
        return err_set(e, ERR_INPUT, "%s: a number from %g to %g expected", text, lo, hi);
    *out = v;
    return 0;
}
