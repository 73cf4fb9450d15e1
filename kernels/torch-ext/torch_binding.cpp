// The Python module of a kernel-builder build. The ops register themselves, one *_binding.cpp each.

#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
