// SPDX-License-Identifier: GPL-2.0
/* Bounds on the files that one user can have open. */

#include <linux/capability.h>
#include <linux/cred.h>
#include <linux/err.h>
#include <linux/hashtable.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/uidgid.h>

#include "user.h"

/**
 * struct ggroup_user - a user that has files open
 * @node: in the table
 * @uid: its id, whatever the user namespace
 * @files: number of files
 */
struct ggroup_user {
	struct hlist_node node;
	kuid_t uid;
	unsigned int files;
};

static unsigned int files_per_user = 4096;
module_param(files_per_user, uint, 0644);
MODULE_PARM_DESC(files_per_user, "Files of /dev/ggroup and usermemfds that a user can have open");

static DEFINE_HASHTABLE(users, 6);
static DEFINE_MUTEX(users_lock);	/* protects the table and its counts */

static struct ggroup_user *find(kuid_t uid)
{
	struct ggroup_user *user;

	hash_for_each_possible(users, user, node, __kuid_val(uid))
		if (uid_eq(user->uid, uid))
			return user;
	return NULL;
}

static struct ggroup_user *find_or_make(kuid_t uid)
{
	struct ggroup_user *user = find(uid);

	if (user)
		return user;
	user = kzalloc(sizeof(*user), GFP_KERNEL_ACCOUNT);
	if (!user)
		return NULL;
	user->uid = uid;
	hash_add(users, &user->node, __kuid_val(uid));
	return user;
}

static void drop_if_idle(struct ggroup_user *user)
{
	if (user->files)
		return;
	hash_del(&user->node);
	kfree(user);
}

struct ggroup_user *ggroup_user_open(void)
{
	struct ggroup_user *user;

	mutex_lock(&users_lock);
	user = find_or_make(current_uid());
	if (!user) {
		user = ERR_PTR(-ENOMEM);
	} else if (user->files >= READ_ONCE(files_per_user) && !capable(CAP_SYS_RESOURCE)) {
		drop_if_idle(user);	/* it is new, and no user may have any */
		user = ERR_PTR(-EMFILE);
	} else {
		user->files++;
	}
	mutex_unlock(&users_lock);
	return user;
}

void ggroup_user_close(struct ggroup_user *user)
{
	mutex_lock(&users_lock);
	user->files--;
	drop_if_idle(user);
	mutex_unlock(&users_lock);
}
