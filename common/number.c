#include "common/number.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void number_text(double x, char out[NUMBER_TEXT])
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(out, NUMBER_TEXT, "%.*g", digits, x);
        if (strtod(out, NULL) == x)
            break;
    }
    if (!strpbrk(out, ".en"))
        memcpy(out + strlen(out), ".0", 3);
}

double number_from_float(float x)
{
    char text[NUMBER_TEXT];
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)x);
        if (strtof(text, NULL) == x)
            break;
    }
    return strtod(text, NULL);
}
