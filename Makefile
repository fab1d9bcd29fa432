# posenc: `make` builds ./train and ./run, `make help` lists the rest.
# Each program is one compile of two sources, so no object file can have stale flags.
CFLAGS  ?= -O3
ARCH    ?= native
OMP     ?= 1
BUILD   ?= build
SANITIZE =
WARN     = -Wall -Wextra -Wshadow

# gnu11 lets the compiler fuse multiply and add, c11 does not; errno of sqrtf would forbid vectors. No -ffast-math: NaN must be seen.
FLAGS    = -std=gnu11 -fno-math-errno $(WARN) $(CFLAGS) $(if $(ARCH),-march=$(ARCH)) $(SANITIZE)

# OpenMP is found by compiling and linking a program that needs it: with gcc and clang, then with Apple's clang and Homebrew's libomp.
ifeq ($(OMP),1)
BREW    := $(shell brew --prefix libomp 2>/dev/null)
try      = $(shell printf '\043include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n' | \
           $(CC) -x c - -o /dev/null $(1) >/dev/null 2>&1 && echo '$(1)')
OPENMP  := $(call try,-fopenmp)
ifeq ($(OPENMP),)
OPENMP  := $(call try,-Xclang -fopenmp $(if $(BREW),-I$(BREW)/include -L$(BREW)/lib) -lomp)
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
