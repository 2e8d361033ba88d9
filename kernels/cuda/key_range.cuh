// The tokens of one row that its new token sees, itself included, and their order as tiles of 16 keys.
//
// Tiles are dealt to warps newest first: tile 0 is the one with the new token, the only one that may have fewer than 16 keys.
#pragma once
#include "types.cuh"

constexpr int TILE_KEYS = 16;
constexpr int MAX_GROUP = 16;  // query heads a KV head
constexpr u32 WHOLE_WARP = 0xffffffffu;

struct KeyRange {
    const int* pages;         // page numbers of the row
    const elem_bits* keys;    // of this KV head in slot 0
    const elem_bits* values;
    u32 stride;               // bytes from slot to slot
    int first, count;         // positions [first, first + count); the last is the new token's
    u32 page_shift;           // log2 of the page size

    __device__ __forceinline__ int num_tiles() const { return (count + TILE_KEYS - 1) / TILE_KEYS; }

    // Which key of the range key `i` of a tile is. Before 0 for tiles that do not exist, from `count` on behind the new token.
    __device__ __forceinline__ int key_of(int tile, int i) const { return (num_tiles() - 1 - tile) * TILE_KEYS + i; }

    // The page entry of a key; of the nearest one that exists, where this one does not.
    __device__ __forceinline__ int page_of(int key) const {
        return pages[(first + max(0, min(key, count - 1))) >> page_shift];
    }

    __device__ __forceinline__ u32 slot_of(int key, int page) const {
        const int position = first + max(0, min(key, count - 1));
        return (static_cast<u32>(page) << page_shift) + (position & ((1u << page_shift) - 1));
    }

    __device__ __forceinline__ bool is_new(int key) const { return key == count - 1; }
};

// The tiles of one warp: `tile`, `tile + step`, ...
struct TileShare {
    int tile, step;
};
