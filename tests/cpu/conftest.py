"""Tests here need no GPU, so they do not see one: `auto` must mean the CPU on every machine, in child processes too."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
