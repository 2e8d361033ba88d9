// One warp's tiles of keys and values on their way through shared memory, several stages deep. 16-bit elements.
//
// Each lane asks for 16 bytes at a time (`cp.async`) and waits for its own; the warp then agrees. No other warp is involved, and no
// register holds what is under way, so a stage is asked for again as soon as it has been used. A stage holds the keys and then the
// values of a tile, a row a key. The 16-byte chunks of row r are exchanged by r % 8, so that eight rows' chunks of one column, which
// is what the tensor cores are fed, lie in different banks.
#pragma once
#include "key_range.cuh"

constexpr int MAX_STAGES = 4;
constexpr u32 ROW_BYTES = HEAD_DIM * 2, ROW_CHUNKS = ROW_BYTES / 16, TILE_BYTES = TILE_KEYS * ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES;
constexpr int ROWS_AT_ONCE = 32 / ROW_CHUNKS;  // that a warp's lanes ask for with one instruction

// Where chunk `chunk` of row `row` is in a tile.
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) { return row * ROW_BYTES + ((chunk ^ row % 8) << 4); }

__device__ __forceinline__ void fill_16_bytes(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void fill_16_zeros(u32 target, const void* somewhere) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, 0;" ::"r"(target), "l"(somewhere) : "memory");
}

__device__ __forceinline__ void end_of_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the youngest `count` groups of this lane have arrived.
template <int count>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(count) : "memory");
}

struct TileRing {
    u32 base;  // shared address of the warp's stages
    u32 num_stages, stage;
    int next_page;  // of key lane % 16 of the tile to ask for next

    // Ask for the first tiles.
    __device__ __forceinline__ void start(const KeyRange& range, const TileShare& share, u32 address, u32 stages) {
        base = address, num_stages = stages, stage = 0;
        const int own = threadIdx.x % TILE_KEYS, second = threadIdx.x / TILE_KEYS % 2;
        int pages[MAX_STAGES / 2];  // of two tiles each, so that all come in one trip
#pragma unroll
        for (int pair = 0; pair < MAX_STAGES / 2; ++pair)
            pages[pair] = range.page_of(range.key_of(share.tile + (2 * pair + second) * share.step, own));
        next_page = range.page_of(range.key_of(share.tile + static_cast<int>(stages) * share.step, own));
#pragma unroll 1
        for (u32 s = 0; s < stages; ++s) {
            const int page = __shfl_sync(WHOLE_WARP, pages[0], s % 2 * TILE_KEYS + own);
            const int tile = share.tile + static_cast<int>(s) * share.step;
            if (tile == 0) fill<true>(range, tile, s, page);
            else fill<false>(range, tile, s, page);
            if (s == 1) pages[0] = pages[1];
        }
    }

    // Shared address of the oldest tile, once it is there.
    __device__ __forceinline__ u32 wait() const {
        if (num_stages == 2) wait_for_groups<1>();
        else if (num_stages == 3) wait_for_groups<2>();
        else wait_for_groups<3>();
        __syncwarp();  // the other lanes' bytes, too
        return base + stage * STAGE_BYTES;
    }

    // The oldest tile, `tile`, is done with: ask for another in its place.
    __device__ __forceinline__ void advance(const KeyRange& range, int tile, int step) {
        __syncwarp();  // all lanes have read it
        const int wanted = tile + static_cast<int>(num_stages) * step;
        fill<false>(range, wanted, stage, next_page);
        next_page = range.page_of(range.key_of(wanted + step, threadIdx.x % TILE_KEYS));
        if (++stage == num_stages) stage = 0;
    }

    // `is_newest`: the tile with the new key, which is left to who makes it; rows behind it become zeros, for a weight of 0 does not
    // remove a NaN.
    template <bool is_newest>
    __device__ __forceinline__ void fill(const KeyRange& range, int tile, u32 to_stage, int page) {
        if (tile < range.num_tiles()) {
            const u32 slot = range.slot_of(range.key_of(tile, threadIdx.x % TILE_KEYS), page);
            const u32 chunk = threadIdx.x % ROW_CHUNKS, first_row = threadIdx.x % 32 / ROW_CHUNKS;
            const u8* keys = reinterpret_cast<const u8*>(range.keys) + chunk * 16;
            const u8* values = reinterpret_cast<const u8*>(range.values) + chunk * 16;
#pragma unroll
            for (int i = 0; i < TILE_KEYS / ROWS_AT_ONCE; ++i) {
                const u32 row = first_row + i * ROWS_AT_ONCE;
                const u64 offset = static_cast<u64>(__shfl_sync(WHOLE_WARP, slot, row)) * range.stride;
                const u32 target = base + to_stage * STAGE_BYTES + chunk_at(row, chunk);
                const int key = is_newest ? range.key_of(tile, row) : 0;
                if (!is_newest || key < range.count - 1) {
                    fill_16_bytes(target, keys + offset);
                    fill_16_bytes(target + TILE_BYTES, values + offset);
                } else if (key >= range.count) {
                    fill_16_zeros(target, keys);
                    fill_16_zeros(target + TILE_BYTES, keys);
                }
            }
        }
        end_of_group();  // of nothing behind the last tile: `wait` counts groups
    }
};
