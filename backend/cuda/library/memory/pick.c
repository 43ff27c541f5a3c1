// SPDX-License-Identifier: Apache-2.0
#include "pick.h"

#include <errno.h>
#include <stdlib.h>

#include "object.h"
#include "order.h"
#include "pages.h"
#include "tree.h"
#include "turn.h"
#include "view.h"

/* Heat of a whole chunk for one use per look. */
#define ONE_USE 16
/* Uses of the most used page before a look means anything; one more or less then makes no difference. */
#define LOOK_USES 8
/* Number of heat levels: half octaves. */
#define LEVELS 64
/* Levels by which a chunk must be hotter than the one it displaces, at least twice as hot; and the least heat for
 * that. */
#define HOTTER 3
#define HOT (4 * ONE_USE)

/* The level of a heat: 0 for none, then 1, 1.5, 2, 3, 4, 6, 8 ...; three levels apart means at least twice as hot. */
static unsigned int level(uint32_t heat)
{
	unsigned int octave;

	if (!heat)
		return 0;
	octave = 31 - (unsigned int)__builtin_clz(heat);
	return 1 + 2 * octave + (octave ? heat >> (octave - 1) & 1 : 0);
}

void pick_each(struct region_tree *tree, void (*visit)(struct pick *pick, void *), void *argument)
{
	struct region *region = tree->ring;

	if (!region)
		return;
	do {
		for (size_t i = 0; i < region->chunks; i++)
			visit(&(struct pick){ region, i }, argument);
		region = region->next;
	} while (region != tree->ring);
}

static struct chunk *chunk_of(const struct pick *pick)
{
	return &pick->region->chunk[pick->index];
}

static size_t bytes_of(const struct pick *pick)
{
	return chunk_bytes(pick->region, pick->index);
}

bool pick_movable(const struct pick *pick, enum chunk_place from)
{
	const struct chunk *chunk = chunk_of(pick);

	return !chunk->busy && !pick->region->freeing && chunk->place == from &&
	       (from == CHUNK_HOST || !chunk->pinned);
}

/* Movable bytes by heat. */
struct heats {
	bool unused;			/* only chunks not used in the last turn */
	uint64_t bytes[2][LEVELS];	/* by enum chunk_place */
};

static void weigh(struct pick *pick, void *argument)
{
	struct heats *heats = argument;
	const struct chunk *chunk = chunk_of(pick);

	if (pick_movable(pick, chunk->place) && !(heats->unused && chunk->order))
		heats->bytes[chunk->place][level(chunk->heat)] += bytes_of(pick);
}

static struct heats weigh_all(struct region_tree *tree, bool unused)
{
	struct heats heats = { .unused = unused };

	pick_each(tree, weigh, &heats);
	return heats;
}

/* Looking */

/* Raises `argument` to the uses of the most used page, for the range of a region mapped at `at`. */
static void most_used(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, void *argument)
{
	uint32_t *most = argument;

	(void)region;
	(void)offset;
	for (const CUdeviceptr end = at + bytes; at < end; at += GG_CHUNK)
		*most = pages_uses(at) > *most ? pages_uses(at) : *most;
}

/* Turns uses of a range into heat. `uses` applies to the page before it; returns what applies to its last page. */
static uint32_t warm(struct region *region, CUdeviceptr at, size_t bytes, size_t offset, uint32_t uses)
{
	const size_t end = offset + bytes;

	for (size_t i = chunk_at(region, offset); offset < end; i++) {
		const size_t next = chunk_offset(region, i) + chunk_bytes(region, i);
		uint64_t sum = 0;

		for (; offset < next && offset < end; offset += GG_CHUNK, at += GG_CHUNK) {
			uses = pages_look(at, uses);
			sum += uses;
		}
		region->chunk[i].heat += (uint32_t)(sum * ONE_USE / (chunk_bytes(region, i) / GG_CHUNK));
	}
	return uses;
}

/* An object that begins in one view continues in the next if that is mapped right behind it: a tensor may be larger
 * than a segment. */
static void warm_views(const struct device *device)
{
	CUdeviceptr end = 0;
	uint32_t uses = 0;

	for (const struct view *view = view_from(0); view; view = view_after(view)) {
		if (view->region->device != device)
			continue;
		uses = warm(view->region, view->address, view->bytes, view->offset, view->address == end ? uses : 0);
		end = view->address + view->bytes;
	}
}

/* Gives every chunk of an object that moves as a whole the average heat. */
static void even_out(struct region *region)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < region->chunks; i++)
		sum += region->chunk[i].heat * (uint64_t)chunk_bytes(region, i);
	for (size_t i = 0; i < region->chunks; i++)
		region->chunk[i].heat = (uint32_t)(sum / region->reserved);
}

bool pick_look(struct device *device, bool must)
{
	struct region_tree *tree = device->regions;
	struct region *region;
	uint64_t heat = 0, chunks = 0;
	uint32_t most = 0;

	pthread_mutex_lock(&tree_lock);
	region = tree->ring;
	for (bool more = region && !must; more && most < LOOK_USES; more = (region = region->next) != tree->ring)
		if (region->object)
			view_each(region, most_used, &most);
		else
			most_used(region, region->address, region->reserved, 0, &most);
	must |= most >= LOOK_USES;
	region = tree->ring;
	for (bool more = region && must; more; more = (region = region->next) != tree->ring) {
		for (size_t i = 0; i < region->chunks; i++)
			region->chunk[i].heat /= 2;
		if (!region->object)
			warm(region, region->address, region->reserved, 0, 0);
	}
	if (must)
		warm_views(device);
	region = tree->ring;
	for (bool more = region && must; more; more = (region = region->next) != tree->ring) {
		if (object_is_whole(region))
			even_out(region);
		for (size_t i = 0; i < region->chunks; i++) {
			heat += region->chunk[i].heat;
			chunks++;
		}
	}
	if (chunks)
		tree->usual = (uint32_t)(heat / chunks);
	pthread_mutex_unlock(&tree_lock);
	return must;
}

size_t pick_misplaced(struct device *device, size_t most)
{
	unsigned int cold = 0, hot = LEVELS - 1;
	struct heats heats;
	size_t bytes = 0;

	pthread_mutex_lock(&tree_lock);
	heats = weigh_all(device->regions, false);
	pthread_mutex_unlock(&tree_lock);
	while (bytes < most && hot >= cold + HOTTER && hot >= level(HOT)) {
		uint64_t *out = &heats.bytes[CHUNK_DEVICE][cold], *in = &heats.bytes[CHUNK_HOST][hot];
		const uint64_t both = *out < *in ? *out : *in;

		bytes += both;
		*out -= both;
		*in -= both;
		if (!*in)
			hot--;
		else
			cold++;
	}
	return bytes < most ? bytes : most;
}

/* Choosing */

int pick_by_address(const void *a, const void *b)
{
	const struct pick *one = a, *other = b;

	if (one->region != other->region && one->region->address != other->region->address)
		return one->region->address < other->region->address ? -1 : 1;
	if (one->region != other->region)	/* objects */
		return one->region->serial < other->region->serial ? -1 : 1;
	return one->index < other->index ? -1 : one->index > other->index;
}

/* The chunks taken so far, and which to take. */
struct taking {
	struct pick *picks;
	size_t count, most;
	size_t bytes, want;
	enum chunk_place from;
	size_t whole_most;	/* largest object that may go as a whole, in bytes */
	unsigned int at;	/* this level */
	bool colder, hotter;	/* or all colder levels, or all hotter ones */
	bool unused;		/* none that was used in the last turn */
};

static bool full(const struct taking *taking)
{
	return taking->count == taking->most || taking->bytes >= taking->want;
}

/* Takes all chunks of a region, or none. */
static bool take_whole(struct region *region, struct taking *taking)
{
	bool all = taking->most - taking->count >= region->chunks && region->reserved <= taking->whole_most;

	for (size_t i = 0; i < region->chunks; i++)
		all = all && pick_movable(&(struct pick){ region, i }, taking->from);
	for (size_t i = 0; all && i < region->chunks; i++) {
		region->chunk[i].busy = true;
		taking->picks[taking->count++] = (struct pick){ region, i };
	}
	taking->bytes += all ? region->reserved : 0;
	return all;
}

static bool take(struct pick *pick, struct taking *taking)
{
	const unsigned int at = level(chunk_of(pick)->heat);

	if (full(taking) || !pick_movable(pick, taking->from) || (taking->unused && chunk_of(pick)->order) ||
	    !(taking->colder ? at < taking->at : taking->hotter ? at > taking->at : at == taking->at))
		return false;
	/* One handle of the driver's holds all of it. */
	if (object_is_whole(pick->region))
		return take_whole(pick->region, taking);
	chunk_of(pick)->busy = true;
	taking->bytes += bytes_of(pick);
	taking->picks[taking->count++] = *pick;
	return true;
}

static void take_each(struct pick *pick, void *argument)
{
	struct taking *taking = argument;

	/* Chunks that come back must fit into the room there is. */
	if (taking->bytes + bytes_of(pick) <= taking->want)
		take(pick, taking);
}

/* Returns the chunk under the CLOCK's hand and moves the hand on; false: there are no chunks. With the lock of the
 * tree. */
static bool tick(struct region_tree *tree, struct pick *pick)
{
	if (!tree->ring)
		return false;
	if (tree->hand >= tree->ring->chunks) {
		tree->ring = tree->ring->next;
		tree->hand = 0;
	}
	*pick = (struct pick){ tree->ring, tree->hand++ };
	return true;
}

static void count_one(struct pick *pick, void *argument)
{
	(void)pick;
	++*(size_t *)argument;
}

static size_t pick_coldest(struct device *device, size_t want, size_t whole_most, struct pick *picks, size_t most,
			   bool goes_on)
{
	/* The memory used in the last turn will be used in the next. */
	const bool waits = turn_is_over(device);
	struct taking taking = { .picks = picks, .most = most, .want = want, .from = CHUNK_DEVICE,
				 .whole_most = whole_most, .unused = waits };
	struct region_tree *tree = device->regions;
	size_t steps = 0, below = 0, hand;
	struct region *ring;
	struct heats heats;
	struct pick pick;

	pthread_mutex_lock(&tree_lock);
	ring = tree->ring;
	hand = tree->hand;
	pick_each(tree, count_one, &steps);
	heats = weigh_all(tree, waits);
	while (taking.at < LEVELS - 1 && below + heats.bytes[CHUNK_DEVICE][taking.at] < want)
		below += heats.bytes[CHUNK_DEVICE][taking.at++];
	/* All colder chunks, wherever they are; of this level those that the hand reaches next. */
	taking.colder = true;
	for (size_t i = 0; i < steps && tick(tree, &pick); i++)
		take(&pick, &taking);
	taking.colder = false;
	for (size_t i = 0; i < steps && !full(&taking) && tick(tree, &pick); i++)
		take(&pick, &taking);
	if (waits && !full(&taking))
		taking.count += order_last(tree, want - taking.bytes, whole_most, picks + taking.count,
					   most - taking.count);
	if (!goes_on) {
		tree->ring = ring;
		tree->hand = hand;
	}
	pthread_mutex_unlock(&tree_lock);
	qsort(picks, taking.count, sizeof(*picks), pick_by_address);
	return taking.count;
}

size_t pick_out(struct device *device, size_t want, size_t whole_most, struct pick *picks, size_t most)
{
	return pick_coldest(device, want, whole_most, picks, most, true);
}

size_t pick_next(struct device *device, size_t want, struct pick *picks, size_t most)
{
	return pick_coldest(device, want, SIZE_MAX, picks, most, false);
}

size_t pick_in(struct device *device, size_t want, struct pick *picks, size_t most)
{
	struct taking taking = { .picks = picks, .most = most, .want = want, .from = CHUNK_HOST, .at = LEVELS,
				 .whole_most = SIZE_MAX };
	struct region_tree *tree = device->regions;
	uint64_t above = 0;
	struct heats heats;

	pthread_mutex_lock(&tree_lock);
	heats = weigh_all(tree, false);
	/* All chunks hotter than the coldest level needed, then as many of that as fit. */
	do
		taking.at--;
	while (taking.at && (above += heats.bytes[CHUNK_HOST][taking.at]) < want);
	taking.hotter = true;
	pick_each(tree, take_each, &taking);
	taking.hotter = false;
	pick_each(tree, take_each, &taking);
	pthread_mutex_unlock(&tree_lock);
	qsort(picks, taking.count, sizeof(*picks), pick_by_address);
	return taking.count;
}

/* Picks the chunks in [address, address + bytes) that `wanted` accepts. With the lock of the tree. */
static size_t take_range(CUdeviceptr address, size_t bytes, bool (*wanted)(const struct pick *, bool), bool how,
			 struct pick *picks, size_t most)
{
	struct region *region = pages_region(address);
	size_t count = 0, last;

	if (!region || region->freeing)
		return 0;
	last = chunk_at(region, address - region->address + (bytes ? bytes - 1 : 0));
	for (size_t i = chunk_at(region, address - region->address); i <= last && i < region->chunks; i++) {
		struct pick pick = { region, i };

		if (count == most || !wanted(&pick, how))
			continue;
		region->chunk[i].busy = true;
		picks[count++] = pick;
	}
	return count;
}

static bool in_the_host(const struct pick *pick, bool unused)
{
	(void)unused;
	return pick_movable(pick, CHUNK_HOST);
}

static bool on_gpu(const struct pick *pick, bool shareable)
{
	const struct chunk *chunk = chunk_of(pick);

	return !chunk->busy && chunk->place == CHUNK_DEVICE && chunk->shareable == shareable;
}

size_t pick_range(CUdeviceptr address, size_t bytes, struct pick *picks, size_t most)
{
	pthread_mutex_lock(&tree_lock);
	size_t count = take_range(address, bytes, in_the_host, false, picks, most);
	pthread_mutex_unlock(&tree_lock);
	return count;
}

size_t pick_shareable(CUdeviceptr address, size_t bytes, uint64_t serial, bool can, struct pick *picks,
			     size_t most)
{
	const struct region *region;
	size_t count = 0;

	if (!pages_near(address))
		return 0;
	pthread_mutex_lock(&tree_lock);
	region = pages_region(address);
	if (region && (!serial || region->serial == serial))
		count = take_range(address, bytes, on_gpu, can, picks, most);
	pthread_mutex_unlock(&tree_lock);
	return count;
}

/* Chunks that stand by with the program */

struct leaving {
	struct pick *picks;
	size_t count, most, bytes, want;
	enum chunk_place place;
	int error;
};

static void take_imported(struct pick *pick, void *argument)
{
	struct leaving *leaving = argument;
	const struct chunk *chunk = chunk_of(pick);

	if (!chunk->imported || !pick_movable(pick, leaving->place) || leaving->count == leaving->most ||
	    leaving->bytes >= leaving->want)
		return;
	chunk_of(pick)->busy = true;
	leaving->bytes += bytes_of(pick);
	leaving->picks[leaving->count++] = *pick;
}

size_t pick_imported(struct device *device, enum chunk_place place, size_t want, struct pick *picks, size_t most)
{
	struct leaving leaving = { .picks = picks, .most = most, .want = want, .place = place };

	pthread_mutex_lock(&tree_lock);
	pick_each(device->regions, take_imported, &leaving);
	pthread_mutex_unlock(&tree_lock);
	qsort(picks, leaving.count, sizeof(*picks), pick_by_address);
	return leaving.count;
}

static void take_all(struct pick *pick, void *argument)
{
	struct leaving *leaving = argument;

	/* Memory created by the program itself survives a checkpoint: the driver carries it. */
	if (object_is_whole(pick->region))
		return;
	if (chunk_of(pick)->pinned)
		leaving->error = EOPNOTSUPP;
	else if (!leaving->error && (pick->region->freeing || chunk_of(pick)->busy))
		leaving->error = EBUSY;
	leaving->picks[leaving->count++] = *pick;
}

int pick_all(struct device *device, struct pick **picks, size_t *count)
{
	struct leaving leaving = { 0 };

	pthread_mutex_lock(&tree_lock);
	pick_each(device->regions, count_one, &leaving.most);
	leaving.picks = calloc(leaving.most ? leaving.most : 1, sizeof(*leaving.picks));
	leaving.error = !leaving.picks ? ENOMEM : device->regions->frees ? EBUSY : 0;
	if (leaving.picks)
		pick_each(device->regions, take_all, &leaving);
	for (size_t i = 0; !leaving.error && i < leaving.count; i++)
		chunk_of(&leaving.picks[i])->busy = true;
	pthread_mutex_unlock(&tree_lock);
	if (leaving.error) {
		free(leaving.picks);
		return leaving.error;
	}
	qsort(leaving.picks, leaving.count, sizeof(*leaving.picks), pick_by_address);
	*picks = leaving.picks;
	*count = leaving.count;
	return 0;
}

void pick_put(const struct pick *picks, size_t count)
{
	pthread_mutex_lock(&tree_lock);
	for (size_t i = 0; i < count; i++)
		picks[i].region->chunk[picks[i].index].busy = false;
	pthread_cond_broadcast(&tree_idle);
	pthread_mutex_unlock(&tree_lock);
}
