/*
 * CHECK(cond): an invariant of our own. When it does not hold the program has a
 * bug and stops with file and line. Never for what comes from outside, and never
 * compiled out.
 */
#ifndef COMMON_CHECK_H
#define COMMON_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: bug: %s does not hold\n", __FILE__, __LINE__, #cond);          \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

#endif
