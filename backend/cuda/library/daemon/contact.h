/* SPDX-License-Identifier: Apache-2.0 */
/* The contact with the daemon: made, looked after and lost. By the listening thread, without the lock of the
 * session. */
#ifndef GGROUP_CUDA_CONTACT_H
#define GGROUP_CUDA_CONTACT_H

/* Connect where there is no connection, and tell of the devices that the daemon does not know. */
void contact_make(void);
/* Take what has come, and send what could not be sent; give up a connection that is broken. */
void contact_receive(void);

#endif
