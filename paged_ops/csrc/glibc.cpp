// Of a library that is linked for an older C library than the one whose headers it was compiled
// with (PAGED_GLIBC in setup.py): what these headers, and libstdc++ inside, ask for and the older
// one lacks.

// Since 2.32: whether the process has one thread, so that counting references needs no atomic
// instructions. Nothing here would tell when that changes, so it says no.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
