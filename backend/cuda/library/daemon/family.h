/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The families of the program, each in the one before: what it asks for itself and its children by its environment
 * (backend/door/environment.py), and what the daemon is told of that.
 *
 * The environment is read as the library is loaded, and GGROUP_FAMILY is put there. So the children of a program that
 * never uses a GPU, such as a shell, are in one family. Values are judged when the first device is used, or asked
 * about.
 */
#ifndef GGROUP_CUDA_FAMILY_H
#define GGROUP_CUDA_FAMILY_H

#include <stdbool.h>

#include "link.h"

/* End the program with a line where its environment asks for something impossible; with GGROUP_LENIENT=1, only write
 * the line. */
void family_begin(void);
/* Make request `number` of those that tell the daemon of the families; false where there are no more. */
bool family_request(unsigned int number, struct message *message);
/* Note that the daemon refused one of the requests, with an errno. The program ends as above, unless it is a later
 * daemon that refused: a program that runs is not ended. */
void family_refused(int error);
/* Note that the daemon took all of them. */
void family_taken(void);
/* In the child of fork(): no daemon has answered it yet. */
void family_forget(void);

#endif
