#include "common/rng.h"

#include <math.h>

double rng_normal(uint64_t key, uint64_t i)
{
    double u = 1.0 - rng_unit(key, 2 * i); /* (0, 1]: the logarithm stays finite */
    double v = rng_unit(key, 2 * i + 1);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}
