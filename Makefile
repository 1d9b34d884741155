# Fullband. `make help` lists the targets.
#
# Everything is built under build/<flavour>; a change of flags rebuilds what depends on them.
# Each folder is a static library (its *.c without mains) and thin mains (fb-*.c).

FLAVOUR  ?= release
B        := build/$(FLAVOUR)
# make V=1 shows the commands in full.
Q        := $(if $(V),,@)
say       = $(if $(V),,@printf '  %-5s %s\n' $(1) $(2))
CC       ?= gcc
ifeq ($(origin CC),default)
CC       := gcc
endif

WARN     := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
            -Wwrite-strings -Wvla -Wformat=2 -Wno-unknown-pragmas -Werror
OPT_release := -O3 -g -march=x86-64-v3 -fno-math-errno -fno-trapping-math
OPT_san     := -O1 -g -march=x86-64-v3 -fsanitize=address,undefined -fno-sanitize-recover=all \
               -fno-omit-frame-pointer
OPT_fuzz    := -O1 -g -march=x86-64-v3 -fsanitize=fuzzer-no-link,address,undefined \
               -fno-sanitize-recover=all -fno-omit-frame-pointer
OPENMP_release := -fopenmp
OPENMP_san     := -fopenmp
OPENMP_fuzz    := -Wno-unused-parameter -Wno-unused-variable # what only the pragmas use
CFLAGS   := -std=c11 -D_GNU_SOURCE -I. $(WARN) $(OPT_$(FLAVOUR)) $(OPENMP_$(FLAVOUR)) $(EXTRA_CFLAGS)
LDFLAGS  := $(OPT_$(FLAVOUR)) $(OPENMP_$(FLAVOUR)) $(EXTRA_LDFLAGS)
LDLIBS   := -ldnnl -lzmq -llmdb -lzstd -lpcre2-8 -ljansson -lyaml -lxxhash -lsodium -lm -lpthread

FOLDERS  := common kernels loader trainer scheduler evaluator ops
# Libraries in link order: a folder stands before those it uses.
LINK     := ops evaluator trainer scheduler loader kernels common

# Shared objects that programs open at run time; each is built where what it wraps is installed.
MPI_CFLAGS := $(shell mpicc --showme:compile 2>/dev/null)
MPI_LIBS   := $(shell mpicc --showme:link 2>/dev/null)
PLUGIN_SRCS := kernels/coll_mpi.c
PLUGINS  := $(if $(MPI_CFLAGS),$(B)/bin/fb-coll-mpi.so)

srcs_of   = $(filter-out $(1)/fb-%.c $(PLUGIN_SRCS),$(wildcard $(1)/*.c $(1)/*/*.c))
mains_of  = $(wildcard $(1)/fb-*.c)
LIB_SRCS := $(foreach f,$(FOLDERS),$(call srcs_of,$(f)))
MAINS    := $(foreach f,$(FOLDERS),$(call mains_of,$(f)))
TESTS    := $(wildcard tests/unit/test_*.c)
FUZZERS  := $(wildcard tests/fuzz/fuzz_*.c)
LIBS     := $(foreach f,$(LINK),$(if $(call srcs_of,$(f)),$(B)/lib$(f).a))
BINS     := $(foreach m,$(MAINS),$(B)/bin/$(basename $(notdir $(m))))
TEST_BINS := $(TESTS:tests/unit/%.c=$(B)/tests/%)
TEST_HELP := $(filter-out $(TESTS),$(wildcard tests/unit/*.c))
FUZZ_BINS := $(FUZZERS:tests/fuzz/%.c=build/fuzz/fuzzers/%)
FUZZ_SECONDS ?= 5

.PHONY: all help setup demo test tests-build san fuzz fuzz-build lint format clean FORCE
.DELETE_ON_ERROR:
.SECONDARY:

all: $(BINS) $(PLUGINS) ## build every program into build/release/bin

help: ## list the targets
	@echo "Fullband: pretraining of full-bandwidth transformers. Targets:"
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- flags stamp: a change of compiler or flags rebuilds everything of that flavour
$(B)/flags: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(CFLAGS) | $(LDFLAGS) $(LDLIBS)' | cmp -s - $@ || \
	    echo '$(CC) $(CFLAGS) | $(LDFLAGS) $(LDLIBS)' > $@
FORCE:

$(B)/obj/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	$(call say,cc,$<)
	$(Q)$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

define lib_rule
$(B)/lib$(1).a: $(patsubst %.c,$(B)/obj/%.o,$(call srcs_of,$(1)))
	@rm -f $$@
	$(call say,ar,$$@)
	$(Q)ar rcs $$@ $$^
endef
$(foreach f,$(LINK),$(eval $(call lib_rule,$(f))))

define bin_rule
$(B)/bin/$(basename $(notdir $(1))): $(B)/obj/$(1:.c=.o) $(LIBS)
	@mkdir -p $$(@D)
	$(call say,link,$$@)
	$(Q)$(CC) $(LDFLAGS) -o $$@ $$< $(LIBS) $(LDLIBS)
endef
$(foreach m,$(MAINS),$(eval $(call bin_rule,$(m))))

$(B)/bin/fb-coll-mpi.so: kernels/coll_mpi.c kernels/coll_transport.h $(B)/flags
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(CFLAGS) $(MPI_CFLAGS) -fPIC -shared -o $@ $< $(MPI_LIBS)

$(B)/tests/%: $(B)/obj/tests/unit/%.o $(patsubst %.c,$(B)/obj/%.o,$(TEST_HELP)) $(LIBS)
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -o $@ $(filter %.o,$^) $(LIBS) -lcmocka $(LDLIBS)

build/fuzz/fuzzers/%: build/fuzz/obj/tests/fuzz/%.o $(patsubst $(B)/%,build/fuzz/%,$(LIBS))
	@mkdir -p $(@D)
	$(call say,link,$@)
	$(Q)$(CC) $(LDFLAGS) -fsanitize=fuzzer -o $@ $< $(patsubst $(B)/%,build/fuzz/%,$(LIBS)) $(LDLIBS)

tests-build: $(TEST_BINS) $(BINS) $(PLUGINS)

fuzz-build: $(FUZZ_BINS)

# A make of its own, on every core where no -j was given.
SUBMAKE = $(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell nproc))

# --- what people call; each installs what it needs first
setup: ## install what building needs (Debian 12)
	@ops/setup

demo: ## from real text to an evaluated checkpoint on this machine (about 6 minutes)
	@ops/demo

test: ## install what is missing, build, run every test
	@ops/setup --test
	+@$(SUBMAKE) all tests-build
	@tests/all build/release

san: ## the unit tests under the address and undefined-behaviour sanitizers
	@ops/setup --test
	+@$(SUBMAKE) FLAVOUR=san tests-build
	@tests/all --unit build/san

fuzz: ## every fuzzer for FUZZ_SECONDS (default 5)
	@ops/setup --dev
	+@$(SUBMAKE) FLAVOUR=fuzz CC=clang fuzz-build
	@tests/fuzz/run $(FUZZ_SECONDS)

lint: ## format, static analysis, headers, folder arrows, scripts
	@ops/setup --dev
	+@$(SUBMAKE) FLAVOUR=lint lint-all

format: ## clang-format every source in place
	@ops/setup --dev
	clang-format -i $(C_FILES)

clean: ## remove build/ (runs/ and data/ stay)
	rm -rf build

# --- lint: one stamp a file, so that a second run checks only what changed
C_FILES   = $(wildcard $(foreach d,$(FOLDERS) tests/unit tests/fuzz,$(d)/*.[ch] $(d)/*/*.[ch]))
LINT_SRCS = $(LIB_SRCS) $(MAINS) $(if $(MPI_CFLAGS),$(PLUGIN_SRCS))
HEADERS   = $(filter %.h,$(C_FILES))
# -idirafter: what clang-tidy has to know of OpenMP, where clang's runtime is not installed.
TIDY_FLAGS := -std=c11 -D_GNU_SOURCE -I. -march=x86-64-v3 -fopenmp -idirafter tests/lint $(MPI_CFLAGS)

.PHONY: lint-all lint-format lint-arrows lint-scripts
lint-all: lint-format lint-arrows lint-scripts $(HEADERS:%=build/lint/%.ok) $(LINT_SRCS:%=build/lint/%.ok)
	@echo "lint: clean"

lint-format:
	@clang-format --dry-run -Werror $(C_FILES)

lint-arrows:
	@tests/arrows

lint-scripts:
	@shellcheck -x $$(grep -lsE '^#!/bin/bash' ops/* tests/* tests/*/* .ci/*)

build/lint/%.h.ok: %.h
	@mkdir -p $(@D)
	@$(CC) -std=c11 -D_GNU_SOURCE -I. $(WARN) -Wno-unused-function -fsyntax-only -x c $<
	@touch $@

build/lint/%.c.ok: %.c .clang-tidy tests/lint/analyzer.h
	@mkdir -p $(@D)
	@echo "lint $<"
	@cppcheck --quiet --error-exitcode=1 --inline-suppr --std=c11 -I. -D__GNUC__ \
	    --enable=warning,performance,portability --suppress=missingIncludeSystem \
	    --suppress=invalidFunctionArg --suppress=uninitvar \
	    --library=tests/lint/cppcheck.cfg $<
	@clang-tidy --quiet --warnings-as-errors='*' $< -- $(TIDY_FLAGS) \
	    $(if $(filter common/err.c,$<),,-include tests/lint/analyzer.h) 2>/dev/null
	@touch $@

-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)
