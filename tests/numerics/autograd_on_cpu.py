"""A plugin of pytest, `-p tests.numerics.autograd_on_cpu`: CPU tensors take the derivative in C++ from here on."""

import os

import torch

import ops

LIBRARY = "ZEROLORA_AUTOGRAD_LIBRARY"
assert callable(ops.lora_group)  # the operators are declared before the library adds to them
torch.ops.load_library(os.environ[LIBRARY])
