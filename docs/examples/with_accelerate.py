"""FOP under Hugging Face Accelerate: `prepare` takes it like any other optimizer."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from metafop.optim import FOP


def main(epochs: int = 3) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(64, 1, 8, 8, generator=generator), torch.arange(64) % 10
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    optimizer = FOP(model, torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * 4)
    batches = DataLoader(TensorDataset(images, labels), batch_size=16)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    losses = []
    for _ in range(epochs):
        for images, labels in batches:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
