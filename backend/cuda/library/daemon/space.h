/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The server that the program is to be a client of. The daemon is asked before the driver is initialised, as CUDA reads
 * CUDA_MPS_PIPE_DIRECTORY then; each program asks for itself, since it may have been moved since its parent did. A
 * variable that does not name a directory of the daemon's is the user's, and is left alone.
 */
#ifndef GGROUP_CUDA_SPACE_H
#define GGROUP_CUDA_SPACE_H

#include <stdbool.h>
#include <stdint.h>

#include "link.h"

/* Ask the daemon, once, and set the variable or take it away. Called before cuInit, with no lock held. */
void space_enter(void);
/* Make the request that tells a daemon which space the program is in; false where it is in none. */
bool space_request(struct message *message);
void space_forget(void);	/* in the child of fork() */

#endif
