/* SPDX-License-Identifier: Apache-2.0 */
/* Legacy IPC between a generator and another process of the same program. */
#ifndef UNIT_OPENED_H
#define UNIT_OPENED_H

/* Run the other process, `objects peer` with a socket in UNIT_PEER: it exports memory, and opens what it is told to. */
void opened_peer(void);

#endif
