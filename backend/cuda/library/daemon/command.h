/* SPDX-License-Identifier: Apache-2.0 */
/* The commands of the daemon, carried out by the listening thread: without the lock of the session. */
#ifndef GGROUP_CUDA_COMMAND_H
#define GGROUP_CUDA_COMMAND_H

/* Carry out the commands that have come, and answer them. */
void command_work(void);
/* Have the grants of host memory that have come hold from now on. */
void command_grant(void);
/* Open all gates of turns, and end all busy periods: no daemon begins a turn of this program. */
void command_end_turns(void);

#endif
