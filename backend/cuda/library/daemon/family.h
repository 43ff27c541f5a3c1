/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the program asks for itself and its children by its environment, as backend/door/environment.py has it, and what
 * the daemon is told of that: its families, each in the one before.
 *
 * The environment is read as the library is loaded, and GGROUP_FAMILY put there: children of a program that never uses
 * a GPU, as a shell, are in one family. Values are judged when the first device is used, or asked about.
 */
#ifndef GGROUP_CUDA_FAMILY_H
#define GGROUP_CUDA_FAMILY_H

#include <stdbool.h>

#include "link.h"

/* Ends the program with a line where its environment asks for what cannot be; GGROUP_LENIENT=1: the line alone. */
void family_begin(void);
/* The request of that number, of those that tell the daemon of the families; false: there are no more. */
bool family_request(unsigned int number, struct message *message);
/* The daemon refused one of them, with an errno. The program ends as above, but for a daemon that comes later: what
 * runs is not ended. */
void family_refused(int error);
/* It took all of them. */
void family_taken(void);
/* In the child of fork(): no daemon has answered it yet. */
void family_forget(void);

#endif
