"""FOP in a Lightning module: `configure_optimizers` is the only place that knows of it."""

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from metafop.optim import FOP


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

    def training_step(self, batch, index):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        for name, value in self.optimizers().optimizer.diagnostics().items():
            self.log(f"fop/{name}", value)
        return loss

    def configure_optimizers(self):
        optimizer = FOP(self.net, torch.optim.SGD, lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 6)]


def main(folder: str, epochs: int = 8) -> lightning.Trainer:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(64, 1, 8, 8, generator=generator), torch.arange(64) % 10
    batches = DataLoader(TensorDataset(images, labels), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), batches)
    return trainer


if __name__ == "__main__":
    print(main(".").callback_metrics["loss"])
