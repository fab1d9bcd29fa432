# posenc: `make` builds ./train and ./run, `make help` lists the rest.
# Each program is one compile of two sources, so no object file can have stale flags.
CFLAGS  ?= -O3
ARCH    ?= native
OMP     ?= 1
BUILD   ?= build
SANITIZE =
WARN     = -Wall -Wextra -Wshadow

# gnu11 lets the compiler fuse multiply and add, c11 does not; errno of sqrtf would forbid vectors.
# No -ffast-math: NaN must be seen.
FLAGS    = -std=gnu11 -fno-math-errno $(WARN) $(CFLAGS) $(TUNE) $(SANITIZE)

# What the compiler can do is found by compiling and linking a program: $(call try,FLAGS,PROGRAM).
try      = $(shell printf '$(2)\n' | $(CC) -x c - -o /dev/null $(1) >/dev/null 2>&1 && echo '$(1)')
MAIN    := int main(void) { return 0; }
USE_OMP := \043include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }

TUNE    := $(if $(ARCH),-march=$(ARCH))
ifeq ($(ARCH),native)
TUNE    := $(or $(call try,-march=native,$(MAIN)),$(call try,-mcpu=native,$(MAIN)))
endif

# OpenMP with gcc and clang, then with Apple's clang and Homebrew's libomp.
ifeq ($(OMP),1)
BREW    := $(shell brew --prefix libomp 2>/dev/null)
OPENMP  := $(call try,-fopenmp,$(USE_OMP))
ifeq ($(OPENMP),)
APPLE   := -Xclang -fopenmp $(if $(BREW),-I$(BREW)/include -L$(BREW)/lib) -lomp
OPENMP  := $(call try,$(APPLE),$(USE_OMP))
endif
ifeq ($(OPENMP),)
$(warning OpenMP was not found for $(CC): building single-threaded)
endif
endif
ifeq ($(OPENMP),)
FLAGS   += -Wno-unknown-pragmas
endif

COMPILE  = $(CC) $(FLAGS) $(OPENMP) $(CPPFLAGS)
LINK     = $(LDFLAGS) -lm
SOURCES  = model.h posenc.c Makefile
TESTS    = $(patsubst tests/%.c,%,$(wildcard tests/test_*.c))

all: train run

train run: %: %.c $(SOURCES)
	$(COMPILE) $< posenc.c -o $@ $(LINK)

$(BUILD)/%: tests/%.c tests/test.h $(SOURCES)
	@mkdir -p $(BUILD)
	$(COMPILE) -I. $< posenc.c -o $@ $(LINK)
$(BUILD)/test_plain: tests/plain.h

# Runs everything, also after a failure; closes with "N passed, N failed". < 1 minute.
test:
	@$(MAKE) --no-print-directory -j2 all $(TESTS:%=$(BUILD)/%)
	@sh tests/run.sh $(TESTS:%=$(BUILD)/%) "sh tests/cli.sh ." \
	    "sh tests/readme.sh README.md scripts/README.md tests/README.md" \
	    "sh tests/python.sh test_pe_bench.py" "sh tests/python.sh test_claims.py"

# The same tests with address and undefined-behaviour sanitizers, in a folder of their own.
asan:
	@$(MAKE) --no-print-directory test-only BUILD=build/asan CFLAGS="-O1 -g" \
	    SANITIZE="-fsanitize=address,undefined -fno-sanitize-recover=undefined"

test-only: $(TESTS:%=$(BUILD)/%)
	@sh tests/run.sh $(TESTS:%=$(BUILD)/%)

# A model of the sample text in under two minutes, and a story it writes.
demo: all
	@mkdir -p $(BUILD)
	./train --pos rope --seed 1 --out $(BUILD)/demo.bin tests/data/stories.txt
	./run $(BUILD)/demo.bin --seed 1 -p "One day, Mia"

# PEERS=1 adds PyTorch, where python3 has it.
bench: $(BUILD)/bench
	@$(BUILD)/bench
	@$(if $(PEERS),python3 tests/bench-torch)

lines:
	@find Makefile *.md *.c *.h tests scripts -maxdepth 1 -type f | sort | xargs wc -l

clean:
	rm -rf build train run

help:
	@echo "make            ./train and ./run"
	@echo "make demo       train on the sample text for two minutes, print a story"
	@echo "make test       all tests            make asan    with sanitizers"
	@echo "make bench      speed and memory beside this machine's limits (PEERS=1: and PyTorch)"
	@echo "make lines      lines of each file   make clean"
	@echo "variables: CC=$(CC) ARCH=$(ARCH) OMP=$(OMP) CFLAGS=\"$(CFLAGS)\";" \
	    "here OpenMP is \"$(OPENMP)\""

.PHONY: all test test-only asan demo bench lines clean help
