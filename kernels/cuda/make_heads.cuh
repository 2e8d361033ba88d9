// The new token's heads of one CTA: queries of the group for the warps, and by the owner k and v for the cache and for the tile of
// the newest keys. A warp makes every `num_warps`-th head. What does not come from the kernel before is read before it has ended.
#pragma once
#include "attention_place.cuh"
#include "new_heads.cuh"
#if ELEM != 2
#include "tile_ring.cuh"
#endif

constexpr u32 HEADS_AT_ONCE = 3;  // of a warp: enough for a group of 10, more take another turn
constexpr u32 PARTS_AT_ONCE = 4;  // of the sums a head comes in: loads on their way together

// A head to the row of the new token in its tile: `tile` of the keys, or of the values.
__device__ __forceinline__ void store_new_row(u8* tile, u32 row, const RawHead& raw) {
#if ELEM != 2
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const u32 elem = head_elem(part, 0);
        *reinterpret_cast<HalfElems*>(tile + chunk_at(row, elem / 8) + elem % 8 * sizeof(elem_bits)) = raw.half[part];
    }
#else
    store_raw(reinterpret_cast<elem_bits*>(tile), raw);
#endif
}

#if ELEM != 2
constexpr u32 NEW_VALUE_AT = TILE_BYTES;  // behind the keys of the stage
#else
constexpr u32 NEW_VALUE_AT = HEAD_DIM * sizeof(elem_bits);
#endif

struct NewHeads {
    u32 count;                            // heads that the CTA makes: the group's, for the owner k and v after them
    const void* sources[HEADS_AT_ONCE];   // this lane's first element of this turn's heads in qkv, in its first part if it has parts
    RawHead bias[HEADS_AT_ONCE];
    RawHead turn, q_norm, k_norm;
    long slot;                            // of the new token

    // Start to read what was there before this step.
    __device__ __forceinline__ void prepare(const AttentionParams& p, const Place& at, const KeyRange& range, int position) {
        count = at.group + (at.is_owner() ? 2 : 0);
        if (p.turns != nullptr) turn = load_raw(p.turns + static_cast<long>(position) * HEAD_DIM);
        if (p.q_norm != nullptr) q_norm = load_raw(p.q_norm), k_norm = load_raw(p.k_norm);
        aim(p, at, threadIdx.x / 32);
        if (at.is_owner()) slot = range.slot_of(range.count - 1, range.page_of(range.count - 1));
    }

    // `tile`: what warp 0 of the owner waits for first. All threads; complete for the CTA after a __syncthreads.
    __device__ __forceinline__ void make(const AttentionParams& p, const Place& at, const KeyRange& range, u8* tile, Shared& shared) {
#pragma unroll 1
        for (u32 first = threadIdx.x / 32; first < count; first += HEADS_AT_ONCE * at.num_warps) {
            Head heads[HEADS_AT_ONCE];
            if (p.num_parts == 0) load_elems(heads);
            else load_parts(p, at, first, heads);
#pragma unroll
            for (u32 i = 0; i < HEADS_AT_ONCE; ++i) {
                const u32 idx = first + at.num_warps * i;
                if (idx < count) store(p, at, range, idx, finished(p, at, idx, heads[i], bias[i]), tile, shared);
            }
            if (first + HEADS_AT_ONCE * at.num_warps < count) aim(p, at, first + HEADS_AT_ONCE * at.num_warps);
        }
    }

    // Find the warp's heads from the CTA's head `first` on. One that is not there has the place of the first.
    __device__ __forceinline__ void aim(const AttentionParams& p, const Place& at, u32 first) {
#pragma unroll
        for (u32 i = 0; i < HEADS_AT_ONCE; ++i) {
            const u32 idx = first + at.num_warps * i < count ? first + at.num_warps * i : min(first, count - 1);
            const u32 number = idx < at.group ? at.kv_head * at.group + idx : p.num_q + at.kv_head + (idx == at.group ? 0 : p.num_kv);
            const long at_elem = (static_cast<long>(at.row) * (p.num_q + 2 * p.num_kv) + number) * HEAD_DIM + head_elem(0, 0);
            sources[i] = static_cast<const u8*>(p.qkv) + at_elem * (p.num_parts == 0 ? sizeof(elem_bits) : sizeof(float));
            asm volatile("" : "+l"(sources[i]));  // found here, not after the wait that follows
            if (p.bias != nullptr) bias[i] = load_raw(p.bias + number * HEAD_DIM);
        }
    }

    __device__ __forceinline__ void load_elems(Head (&heads)[HEADS_AT_ONCE]) const {
        RawHead raw[HEADS_AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < HEADS_AT_ONCE; ++i) raw[i] = load_raw_at(static_cast<const elem_bits*>(sources[i]));
#pragma unroll
        for (u32 i = 0; i < HEADS_AT_ONCE; ++i) heads[i] = to_head(raw[i]);
    }

    __device__ __forceinline__ void load_parts(const AttentionParams& p, const Place& at, u32 first, Head (&heads)[HEADS_AT_ONCE]) const {
        const long part_floats = static_cast<long>(gridDim.z) * (p.num_q + 2 * p.num_kv) * HEAD_DIM;
#pragma unroll
        for (u32 i = 0; i < HEADS_AT_ONCE; ++i) heads[i] = {};
#pragma unroll 1
        for (u32 begin = 0; begin < p.num_parts; begin += PARTS_AT_ONCE) {
            Head parts[PARTS_AT_ONCE][HEADS_AT_ONCE];
#pragma unroll
            for (u32 part = 0; part < PARTS_AT_ONCE; ++part)
#pragma unroll
                for (u32 i = 0; i < HEADS_AT_ONCE; ++i)
                    parts[part][i] = load_part_if(static_cast<const float*>(sources[i]) + (begin + part) * part_floats,
                                                  begin + part < p.num_parts && first + at.num_warps * i < count);
#pragma unroll
            for (u32 part = 0; part < PARTS_AT_ONCE; ++part)
#pragma unroll
                for (u32 i = 0; i < HEADS_AT_ONCE; ++i) add(heads[i], parts[part][i]);
        }
    }

    __device__ __forceinline__ RawHead finished(
        const AttentionParams& p, const Place& at, u32 idx, Head head, const RawHead& own_bias) const {
        if (p.bias != nullptr) add(head, to_head(own_bias));
        round_head(head);
        if (idx != at.group + 1) {  // no value
            if (p.q_norm != nullptr) normalise(head, to_head(idx == at.group ? RawHead(k_norm) : RawHead(q_norm)), p.eps);
            if (p.turns != nullptr) rotate(head, to_head(turn));
        }
        return to_raw(head);
    }

    __device__ __forceinline__ void store(
        const AttentionParams& p, const Place& at, const KeyRange& range, u32 idx, const RawHead& raw, u8* tile, Shared& shared) const {
        if (idx < at.group) {
            store_raw(shared.queries[idx], raw);
            return;
        }
        const bool is_key = idx == at.group;
        store_raw((is_key ? p.keys : p.values) + (slot * p.num_kv + at.kv_head) * HEAD_DIM, raw);
        store_new_row(tile + (is_key ? 0 : NEW_VALUE_AT), (range.count - 1) % TILE_KEYS, raw);
    }
};
