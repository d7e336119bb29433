"""Images in ImageNet's layout are listed, read and cropped the same whoever reads them, and when."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refusal
from torch.utils.data import DataLoader

from experiments.data import generated, image_folder


@pytest.fixture
def root(tmp_path):
    """Twelve images to train on and six to validate by, 24 pixels wide, of three classes."""
    image_folder.write(
        tmp_path, generated.generated(classes=3, training=12, test=6), size=24, training=12, test=6
    )
    return tmp_path


def test_images_are_listed_by_class_in_order(root):
    for name in ("train", "val"):
        (root / name / "0001").rename(root / name / "zebra")
    (root / "train" / "zebra" / "README.txt").touch()
    Image.new("L", (5, 9)).save(root / "train" / "zebra" / "x.JPEG")
    classes, training, validation = image_folder.listing(root)
    assert classes == ["0000", "0002", "zebra"]
    assert [len(training), len(validation)] == [13, 6]
    assert all(Path(path).parent.name == classes[label] for path, label in training + validation)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_augmentation_is_drawn_from_seed_epoch_and_index_whoever_draws_it(root, workers):
    images = image_folder.Folder(image_folder.listing(root).training, size=16, train=True, seed=3)
    keys = [(index, epoch) for epoch in (0, 5) for index in (4, 0, 11)]
    batches = DataLoader(images, batch_sampler=[keys[:2], keys[2:]], num_workers=workers)
    found, labels = (torch.cat(x) for x in zip(*batches, strict=True))
    alone = [images[key] for key in reversed(keys)]
    torch.testing.assert_close(found.flip(0), torch.stack([image for image, _ in alone]), rtol=0, atol=0)
    assert labels.flip(0).tolist() == [label for _, label in alone]
    assert found.shape == (6, 3, 16, 16)
    assert found.dtype == torch.float32


def test_an_augmentation_differs_by_seed_epoch_and_index(root):
    listed = image_folder.listing(root).training
    first = image_folder.Folder([listed[0]] * 2, size=16, train=True, seed=0)
    second = image_folder.Folder([listed[0]] * 2, size=16, train=True, seed=1)
    drawn = [first[0, 0][0], first[0, 1][0], first[1, 0][0], second[0, 0][0]]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_validation_image_is_its_middle_whatever_the_epoch(root):
    values = np.arange(256 * 300 * 3, dtype=np.uint32).reshape(256, 300, 3) % 251
    path = root / "val" / "0000" / "wide.png"
    Image.fromarray(values.astype(np.uint8)).save(path)
    images = image_folder.Folder([image_folder.Sample(str(path), 0)], size=224, train=False, seed=0)
    expected = torch.tensor(values[16:240, 38:262].astype(np.float32)).permute(2, 0, 1) / 255
    assert torch.equal(images[0, 0][0], (expected - image_folder.MEAN) / image_folder.DEVIATION)
    assert torch.equal(images[0, 0][0], images[0, 1][0])


@pytest.mark.parametrize(("width", "height"), [(24, 24), (24, 31), (500, 3), (1, 200), (1, 1)])
def test_every_crop_lies_in_its_image(width, height):
    for seed in range(200):
        left, upper, right, lower = image_folder.crop(width, height, Random(seed))
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= height


def test_crops_are_of_any_allowed_area_and_ratio():
    crops = torch.tensor([image_folder.crop(400, 300, Random(seed)) for seed in range(2000)])
    width, height = (crops[:, 2] - crops[:, 0]).double(), (crops[:, 3] - crops[:, 1]).double()
    areas, ratios = width * height / (400 * 300), width / height
    torch.testing.assert_close(areas.aminmax(), areas.new_tensor([0.08, 1.0]).unbind(), rtol=0, atol=0.02)
    torch.testing.assert_close(
        ratios.aminmax(), ratios.new_tensor([3 / 4, 4 / 3]).unbind(), rtol=0, atol=0.02
    )


def test_half_of_the_images_are_mirrored():
    image = Image.linear_gradient("L").rotate(90).convert("RGB")  # brighter to the right
    mirrored = 0
    for seed in range(400):
        row = np.array(image_folder.augmented(image, 8, Random(seed)))[0, :, 0]
        mirrored += int(row[0] > row[-1])
    assert 160 < mirrored < 240


def test_images_of_any_mode_and_shape_become_three_colours(root):
    for mode, size in (("L", (40, 9)), ("RGBA", (9, 40)), ("CMYK", (20, 20)), ("1", (3, 3))):
        path = str(root / f"any{'.jpeg' if mode == 'CMYK' else '.png'}")
        Image.new(mode, size).save(path)
        for train in (True, False):
            assert image_folder.Folder([image_folder.Sample(path, 0)], 8, train, 0)[0, 0][0].shape == (
                3,
                8,
                8,
            )


def test_classes_that_differ_are_refused(root):
    (root / "val" / "0002").rename(root / "val" / "other")
    message = refusal(image_folder.listing, root)
    assert "2 are in one of them alone, as '0002'" in message


@pytest.mark.parametrize("emptied", ["root", "train", "val", "images"])
def test_an_empty_folder_is_refused_with_the_layout(root, emptied, tmp_path):
    if emptied == "images":
        for path in (root / "train").rglob("*.png"):
            path.unlink()
    elif emptied == "root":
        root = tmp_path / "nowhere"
    else:
        (root / emptied).rename(root / "moved")
    message = refusal(image_folder.listing, root)
    assert message.startswith(("The folders in ", "")[emptied != "images"] + str(root))
    assert image_folder.LAYOUT in message


@pytest.mark.parametrize("kept", [0.0, 0.5])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(root, kept, workers):
    listed = image_folder.listing(root).training
    path = Path(listed[2].path)
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    images = image_folder.Folder(listed, size=16, train=True, seed=0)
    batches = DataLoader(images, batch_sampler=[[(2, 0)]], num_workers=workers)
    with pytest.raises(RuntimeError, match=f"Cannot read the image {path} .*Replace or remove the file"):
        next(iter(batches))


def test_more_images_than_there_are_cannot_be_written(tmp_path):
    message = refusal(image_folder.write, tmp_path, generated.generated(training=8, test=4), 16, 8, 5)
    assert "5 images were asked for" in message
    assert "has 4" in message
