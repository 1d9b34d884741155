/*
 * What of OpenMP clang-tidy has to know (make lint). Programs are built with gcc and its own omp.h,
 * which clang does not read.
 */
#ifndef TESTS_LINT_OMP_H
#define TESTS_LINT_OMP_H

int omp_get_max_threads(void);
int omp_get_num_threads(void);
int omp_get_thread_num(void);
int omp_get_num_procs(void);
int omp_get_thread_limit(void);
void omp_set_num_threads(int count);
void omp_set_dynamic(int dynamic);

#endif
