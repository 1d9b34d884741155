/*
 * Decimal text of floating-point numbers: the shortest that reads back to the same value, the same
 * on every machine. What YAML and JSON of ours hold.
 */
#ifndef COMMON_NUMBER_H
#define COMMON_NUMBER_H

#define NUMBER_TEXT 40

/* Finite x as text with a point or an exponent ("1.0", "0.02", "1e-05"). */
void number_text(double x, char out[NUMBER_TEXT]);

/* The double nearest to the shortest decimal that names the float x: 1e-5f gives 1e-5. */
double number_from_float(float x);

#endif
