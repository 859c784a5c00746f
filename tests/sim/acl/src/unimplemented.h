// What the generated entry points call, and what tests ask.
#pragma once

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

// Counts a call of an entry point that isn't implemented; returns the error code for it.
SIM_EXPORT int sim_unimplemented(const char* name);

// JSON: {"unimplemented": {name: calls}, "launches": {"count": n, "last": {...}}}.
SIM_EXPORT const char* sim_acl_report();
