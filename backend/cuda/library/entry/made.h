/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes the wrappers of one kind from their rows of entries.def. A file that includes this defines MAKE_<kind>(name,
 * parameters, arguments); rows of other kinds make nothing. To be included once, and last.
 */
#ifndef MAKE_GATED
#define MAKE_GATED(...)
#endif
#ifndef MAKE_JOIN
#define MAKE_JOIN(...)
#endif
#ifndef MAKE_LOOKS
#define MAKE_LOOKS(...)
#endif
#ifndef MAKE_WAIT
#define MAKE_WAIT(...)
#endif
#ifndef MAKE_WAIT_STREAM
#define MAKE_WAIT_STREAM(...)
#endif
#ifndef MAKE_WAIT_CONTEXT
#define MAKE_WAIT_CONTEXT(...)
#endif
#define MAKE_HOOK(...)
#define MAKE_CONTEXT(...)
#define MAKE_LAUNCH(...)
#define MAKE_STREAM(...)
#define MAKE_GRAPH(...)
#define MAKE_CODE(...)
#define MAKE_MEMORY(...)
#define MAKE_TRANSFER(...)
#define MAKE_ADVICE(...)

#define ENTRY(name, kind, parameters, arguments, since) MAKE_##kind(name, parameters, arguments)
#include "entries.def"
#undef ENTRY
