"""Stands in for GPU memory in the trial of CUDA IPC: files that processes share, with one fault of choice."""

import mmap
import os
import struct
import time
from pathlib import Path


class FileMemory:
    """`launch.probe_ipc.DeviceMemory` in the files of `folder`. The process on device `faulty` shows `fault`."""

    def __init__(self, folder, fault, faulty, device):
        self.folder, self.maps = Path(folder), {}
        self.fault = fault if device == faulty else ""
        if self.fault == "refuse":
            raise RuntimeError("no such device")

    def _map(self, path):
        with path.open("r+b") as file:
            address = (len(self.maps) + 1) << 32
            self.maps[address] = mmap.mmap(file.fileno(), 0), path
            return address

    def _at(self, address):
        return self.maps[address >> 32 << 32][0], address % (1 << 32)

    def allocate(self, num_bytes):
        path = self.folder / f"memory-{os.getpid()}"
        path.write_bytes(bytes(num_bytes))
        return self._map(path)

    def export(self, address):
        if self.fault == "die":
            os._exit(3)
        return str(self.maps[address][1]).encode()

    def open(self, handle):
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "slow":
            time.sleep(1.0)
        path = Path(handle.decode())
        if not path.exists():
            raise RuntimeError("freed before it was closed")
        if self.fault == "copy":  # a mapping of something else: reads old bytes, and writes go nowhere
            path = path.with_suffix(f".{os.getpid()}")
            path.write_bytes(Path(handle.decode()).read_bytes())
        if self.fault == "zeros":
            path = path.with_suffix(f".{os.getpid()}")
            path.write_bytes(bytes(Path(handle.decode()).stat().st_size))
        return self._map(path)

    def close(self, address):
        self.maps.pop(address)[0].close()

    def free(self, address):
        memory, path = self.maps.pop(address)
        memory.close()
        path.unlink()

    def fill(self, address, word, num_words):
        memory, offset = self._at(address)
        memory[offset : offset + 4 * num_words] = struct.pack("<I", word) * num_words

    def read(self, address, num_words):
        memory, offset = self._at(address)
        return list(struct.unpack_from(f"<{num_words}I", memory, offset))
