"""Train one adapted linear towards a random low-rank change of its weight, then time the plain backward.

    python -m examples.lora_layer [--tokens 2048] [--width 1024] [--rank 16] [--steps 60]

Runs on a GPU if one is available (and builds the kernels), otherwise on the CPU with the reference.
"""

import argparse
import time

import torch

import ops


def train(device: str, tokens: int, width: int, rank: int, steps: int) -> list[float]:
    """Return the losses of `steps` Adam steps on A and B; the target has rank `rank`, so the loss can reach zero."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, size: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * size

    weight = normal(width, width, size=width**-0.5)
    change = normal(width, rank, size=rank**-0.5) @ normal(rank, width, size=width**-0.5)
    down = normal(rank, width, size=width**-0.5).requires_grad_()
    up = torch.zeros(width, rank, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([down, up], lr=2e-2)
    losses = []
    for _ in range(steps):
        x = normal(tokens, width, size=1.0)
        y = ops.lora_linear(x, weight, None, down, up, scale=1.0)
        loss = torch.nn.functional.mse_loss(y, x @ (weight + change).t())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def time_backward(device: str, tokens: int, width: int, rank: int, repeats: int = 20) -> float:
    """Return the milliseconds of one `ops.lora_backward` (dX, dA, dB) in fp32."""
    grad_y, x = (torch.randn(tokens, width, device=device) for _ in range(2))
    down, up = torch.randn(rank, width, device=device), torch.randn(width, rank, device=device)
    begin = 0.0
    for repeat in range(repeats + 3):
        if repeat == 3:
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        ops.lora_backward(grad_y, x, down, up, scale=2.0)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = ops.load_backend("auto") if device == "cuda" else None
    losses = train(device, options.tokens, options.width, options.rank, options.steps)
    print(f"{device}, operators: {backend.name if backend else 'reference'}")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    took = time_backward(device, options.tokens, options.width, options.rank)
    print(f"lora_backward T={options.tokens} I=O={options.width} R={options.rank} fp32: {took:.3f} ms")


if __name__ == "__main__":
    main()
