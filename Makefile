# Fullband. `make help` lists the targets.
#
# Everything is built under build/<flavour>; a change of flags rebuilds what depends on them.
# Each folder is a static library (its *.c without mains) and thin mains (fb-*.c).

FLAVOUR  ?= release
B        := build/$(FLAVOUR)
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
OPENMP_fuzz    :=
CFLAGS   := -std=c11 -D_GNU_SOURCE -I. $(WARN) $(OPT_$(FLAVOUR)) $(OPENMP_$(FLAVOUR)) $(EXTRA_CFLAGS)
LDFLAGS  := $(OPT_$(FLAVOUR)) $(OPENMP_$(FLAVOUR)) $(EXTRA_LDFLAGS)
LDLIBS   := -ldnnl -lzmq -llmdb -lzstd -lpcre2-8 -ljansson -lyaml -lxxhash -lsodium -lm -lpthread

FOLDERS  := common kernels loader trainer scheduler evaluator ops
# Libraries in link order: a folder stands before those it uses.
LINK     := ops evaluator trainer scheduler loader kernels common

srcs_of   = $(filter-out $(1)/fb-%.c,$(wildcard $(1)/*.c $(1)/*/*.c))
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

.PHONY: all help test demo san fuzz fuzz-build lint format clean setup tests-build
.DELETE_ON_ERROR:
.SECONDARY:

all: $(BINS) ## build every program into build/release/bin

help: ## list the targets
	@awk -F':.*## ' '/^[a-z][a-z-]*:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- flags stamp: a change of compiler or flags rebuilds everything of that flavour
$(B)/flags: FORCE
	@mkdir -p $(B)
	@echo '$(CC) $(CFLAGS) | $(LDFLAGS) $(LDLIBS)' | cmp -s - $@ || \
	    echo '$(CC) $(CFLAGS) | $(LDFLAGS) $(LDLIBS)' > $@
FORCE:

$(B)/obj/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<

define lib_rule
$(B)/lib$(1).a: $(patsubst %.c,$(B)/obj/%.o,$(call srcs_of,$(1)))
	@rm -f $$@
	ar rcs $$@ $$^
endef
$(foreach f,$(LINK),$(eval $(call lib_rule,$(f))))

define bin_rule
$(B)/bin/$(basename $(notdir $(1))): $(B)/obj/$(1:.c=.o) $(LIBS)
	@mkdir -p $$(@D)
	$(CC) $(LDFLAGS) -o $$@ $$< $(LIBS) $(LDLIBS)
endef
$(foreach m,$(MAINS),$(eval $(call bin_rule,$(m))))

$(B)/tests/%: $(B)/obj/tests/unit/%.o $(patsubst %.c,$(B)/obj/%.o,$(TEST_HELP)) $(LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $(filter %.o,$^) $(LIBS) -lcmocka $(LDLIBS)

build/fuzz/fuzzers/%: build/fuzz/obj/tests/fuzz/%.o $(patsubst $(B)/%,build/fuzz/%,$(LIBS))
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -fsanitize=fuzzer -o $@ $< $(patsubst $(B)/%,build/fuzz/%,$(LIBS)) $(LDLIBS)

tests-build: $(TEST_BINS) $(BINS)

-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)
