/*
 * For clang-tidy alone (make lint): errors are negative. Without seeing common/err.c the analyzer
 * takes `return err_set(…)` for a possible success and follows paths that do not exist.
 */
#include "common/err.h"

#define err_set(e, code, ...) ((err_set)(e, code, __VA_ARGS__), (code) < 0 ? (code) : ERR_STATE)
#define err_errno(...)        ((err_errno)(__VA_ARGS__), ERR_IO)
#define err_prefix(...)       ((err_prefix)(__VA_ARGS__), ERR_STATE)
