// SPDX-License-Identifier: Apache-2.0
/*
 * The kernel of hash.c, compiled in hash_ptx.h, which says how.
 *
 * NH (UMAC, RFC 4418): the sum modulo 2^128 of (m[2i] + k[2i]) * (m[2i+1] + k[2i+1]), of words and sums of 64 bits. Two
 * different chunks have the same mark with a probability of at most 2^-64, if the key is as random as it looks: it is
 * made from 128 random bits and the place of each word.
 */
#define PART 16384		/* vectors of 16 bytes per block: PART_BYTES of hash.c */
#define THREADS 256

typedef unsigned long long word;

static __device__ word mixed(word x)	/* the finalizer of MurmurHash3 */
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	return x ^ x >> 33;
}

/* Sums consecutive chunks, one per row of blocks; the blocks of a row share a chunk, and each leaves its sum. */
extern "C" __global__ void __launch_bounds__(THREADS)
ggroup_hash(const ulonglong2 *data, word vectors, ulonglong2 *sums, word key0, word key1)
{
	__shared__ unsigned __int128 warps[THREADS / 32];
	const ulonglong2 *chunk = data + blockIdx.y * vectors;
	unsigned __int128 sum = 0;

#pragma unroll 8
	for (unsigned int k = threadIdx.x; k < PART; k += THREADS) {
		const word i = (word)blockIdx.x * PART + k;
		const ulonglong2 v = chunk[i];

		sum += (unsigned __int128)(v.x + mixed(key0 + i * 0x9e3779b97f4a7c15ULL)) *
		       (v.y + mixed(key1 + i * 0xd1342543de82ef95ULL));
	}
	for (int lanes = 16; lanes; lanes /= 2) {
		const word low = __shfl_xor_sync(~0U, (word)sum, lanes),
			   high = __shfl_xor_sync(~0U, (word)(sum >> 64), lanes);

		sum += (unsigned __int128)high << 64 | low;
	}
	if (threadIdx.x % 32 == 0)
		warps[threadIdx.x / 32] = sum;
	__syncthreads();
	if (threadIdx.x)
		return;
	for (int i = 1; i < THREADS / 32; i++)
		sum += warps[i];
	sums[blockIdx.y * gridDim.x + blockIdx.x] = make_ulonglong2((word)sum, (word)(sum >> 64));
}
