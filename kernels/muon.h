/*
 * Orthogonalisation of a matrix by Newton–Schulz iteration, written against the device table: what
 * Muon makes of a momentum.
 *
 *   X ← G / (‖G‖_F + 1e-7), then five times, with A = X Xᵀ,
 *   X ← a X + (b A + c A²) X        a, b, c = 3.4445, −4.7750, 2.0315
 *
 * That keeps the singular vectors and brings every singular value σ of X through
 * aσ + bσ³ + cσ⁵ into about 0.7 … 1.2: near the nearest orthogonal matrix, with five products that
 * are smaller for the smaller side (a tall matrix goes by A = Xᵀ X and X (b A + c A²)).
 * Sources: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), the
 * coefficients are theirs; J. Bernstein, L. Newhouse, "Old optimizer, new norm" (arXiv 2409.20325).
 */
#ifndef KERNELS_MUON_H
#define KERNELS_MUON_H

#include "kernels/device.h"

#define MUON_STEPS 5

/* Floats of scratch; at least rows · columns. */
size_t muon_work_floats(int rows, int columns);

/* x (rows, columns), device, in place. Zeros stay zeros. Synchronises (for the norm). */
void muon_orthogonalize(struct device *d, float *x, int rows, int columns, float *work);

/* Multiplications and additions of the above, times two. */
double muon_flops(int rows, int columns);

#endif
