// Stand-in for the header of this name that kernel-builder generates over it: there, REGISTER_EXTENSION makes the
// library importable as a Python module; a library that torch loads needs nothing.
#pragma once

#include "library.h"

#define REGISTER_EXTENSION(NAME)
