"""Published data is read wherever it lies and only if intact; images in folders are cropped reproducibly."""

import gzip
import os
import struct
import tarfile
from functools import partial
from hashlib import md5
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import pooch
import pytest
import torch
from problems import refusal
from torch.nn.functional import cross_entropy

from experiments import data
from experiments.data import cifar, fetch, files, generated, mnist

REAL = Path(os.environ.get(files.FOLDER) or Path(__file__).parents[3] / "shared" / "data")
real = pytest.mark.skipif(not (REAL / "cifar10").is_dir(), reason="no folder with the real data")
NAMES = [name for archive in (*mnist.ARCHIVES, *cifar.ARCHIVES) for name in archive.contents]


def digest(content):
    return md5(content).hexdigest()


def content(name):
    """A small file in the published form: three images, of a value that goes by its name."""
    if name.endswith(".bin"):
        return b"".join(bytes([i] + [NAMES.index(name)] * 3072) for i in range(3))
    if "labels" in name:
        return struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes(range(3))
    return struct.pack(">4B3I", 0, 0, 8, 3, 3, 28, 28) + bytes([NAMES.index(name)]) * 3 * 28 * 28


def tarred(contents, kind):
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz" if kind == "xz" else "w:gz") as tar:
        for name, inside in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(inside)
            tar.addfile(member, BytesIO(inside))
    return packed.getvalue()


@pytest.fixture
def published(monkeypatch):
    """What is published, made small: every archive by its name, and the tables that say so."""
    packed = {}
    for module in (mnist, cifar):
        table = []
        for archive in module.ARCHIVES:
            inside = {name: content(name) for name in archive.contents}
            tar = archive.name.endswith(".tar.gz")
            packed[archive.name] = tarred(inside, "gz") if tar else gzip.compress(inside[archive.name[:-3]])
            sums = {name: digest(x) for name, x in inside.items()}
            table.append(archive._replace(md5=digest(packed[archive.name]), contents=sums))
        monkeypatch.setattr(module, "ARCHIVES", tuple(table))
    return packed


@pytest.fixture
def here(published, tmp_path):
    """A folder of all data, as published."""
    for name, packed in published.items():
        path = tmp_path / "data" / ("cifar10" if "cifar" in name else "mnist") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed)
    return tmp_path / "data"


@pytest.fixture
def served(published, tmp_path, monkeypatch):
    """An address for every archive, in this process, and the folder that it serves."""
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    (tmp_path / "served").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=tmp_path / "served")) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        for module in (mnist, cifar):
            address = f"http://127.0.0.1:{server.server_port}/"
            table = [
                x._replace(addresses=(f"{address}no/{x.name}", address + x.name)) for x in module.ARCHIVES
            ]
            monkeypatch.setattr(module, "ARCHIVES", tuple(table))
        for name, packed in published.items():
            (tmp_path / "served" / name).write_bytes(packed)
        yield tmp_path / "served"
        server.shutdown()
        thread.join()


def same(a, b):
    torch.testing.assert_close(tuple(map(tuple, a)), tuple(map(tuple, b)), rtol=0, atol=0)


@real
def test_mnist_is_what_was_published():
    training, test = mnist.load(REAL)
    assert training.images.shape == (60_000, 1, 28, 28)
    assert test.images.shape == (10_000, 1, 28, 28)
    assert training.images.dtype == torch.uint8
    assert training.labels.dtype == torch.int64
    assert training.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert training.labels.bincount()[0] == 5923
    assert training.images.float().mean() / 255 == pytest.approx(0.1307, abs=1e-4)


@real
def test_cifar_is_what_was_published_and_the_same_from_its_archive_and_unpacked():
    archived = cifar.load(REAL)
    training, test = archived
    assert training.images.shape == (50_000, 3, 32, 32)
    assert test.images.shape == (10_000, 3, 32, 32)
    assert training.labels.bincount().tolist() == [5000] * 10
    assert test.labels.bincount().tolist() == [1000] * 10
    means = training.images.float().mean((0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)

    images = torch.cat([training.images, test.images]).flatten(1)
    labels = torch.cat([training.labels, test.labels]).to(torch.uint8)[:, None]
    batches = torch.cat([labels, images], 1).split(10_000)
    with TemporaryDirectory() as root:
        below = Path(root) / "cifar10" / "cifar-10-batches-bin"
        below.mkdir(parents=True)
        for name, batch in zip(cifar.ARCHIVES[0].contents, batches, strict=True):
            (below / name).write_bytes(batch.numpy().tobytes())
        same(cifar.load(Path(root)), archived)


def test_a_dataset_is_read_once_in_a_process(here):
    assert data.load("mnist", here) is data.load("mnist", here)


def test_the_environment_names_the_folder_where_no_flag_does(here, monkeypatch):
    monkeypatch.setenv(files.FOLDER, str(here))
    assert data.load("mnist") is data.load("mnist", here)


def test_values_and_labels_are_those_of_the_files(here):
    for name in ("mnist", "cifar10"):
        training, test = data.load(name, here)
        assert test.labels.tolist() == [0, 1, 2]
        assert training.labels.tolist() == [0, 1, 2] * (5 if name == "cifar10" else 1)
        assert test.images.unique().tolist() == [NAMES.index(cifar.TEST if name == "cifar10" else NAMES[2])]


@pytest.mark.parametrize("kind", ["xz", "gz"])
def test_cifar_is_read_from_a_tar_of_any_name(here, kind):
    expected = cifar.load(here)
    (here / "cifar10" / "cifar-10-binary.tar.gz").unlink()
    batches = {name: content(name) for name in cifar.ARCHIVES[0].contents}
    (here / "cifar10" / f"mine.tar.{kind}").write_bytes(tarred({"readme.html": b"", **batches}, kind))
    same(cifar.load(here), expected)


def test_mnist_is_read_unpacked_and_packed_again(here):
    expected = mnist.load(here)
    for i, path in enumerate(sorted((here / "mnist").iterdir())):
        unpacked = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(unpacked, compresslevel=1))
        if i % 2:
            path.unlink()
            path.with_suffix("").write_bytes(unpacked)
    same(mnist.load(here), expected)


def test_a_file_in_place_of_the_folder_of_all_data_is_refused(tmp_path):
    (tmp_path / "data.tar").touch()
    with pytest.raises(
        SystemExit, match=r"data\.tar is a file\. Name the folder that holds the data, by --data"
    ):
        files.named(tmp_path / "data.tar")


def test_a_missing_file_is_named_with_its_md5_and_the_command_that_fetches_it(here):
    (here / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    message = refusal(mnist.load, here)
    assert f"{here / 'mnist' / 't10k-labels-idx1-ubyte'} is missing" in message
    assert digest(content("t10k-labels-idx1-ubyte")) in message
    assert message.endswith(f"python -m experiments fetch --data {here}")


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("kind", ["mnist", "gz", "xz"])
def test_a_truncated_archive_is_named(here, kind, kept):
    module, name = (mnist, "train-images-idx3-ubyte.gz") if kind == "mnist" else (cifar, "cifar.tar." + kind)
    path = here / module.ARCHIVES[0].folder / name
    if module is cifar:
        (here / "cifar10" / "cifar-10-binary.tar.gz").unlink()
        path.write_bytes(tarred({name: content(name) for name in cifar.ARCHIVES[0].contents}, kind))
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    message = refusal(module.load, here)
    assert message.startswith(f"{path} cannot be read to its end" if kept else str(path))
    assert next(iter(module.ARCHIVES[0].contents.values())) in message
    assert str(here) in message.split("experiments fetch --data ")[1]


def test_an_altered_byte_is_refused_with_both_sums(here):
    altered = content("train-images-idx3-ubyte")[:-1] + b"\xff"
    path = here / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(altered))
    message = refusal(mnist.load, here)
    assert message.startswith(f"{path} is altered")
    assert digest(altered) in message
    assert digest(content("train-images-idx3-ubyte")) in message


def test_an_idx_file_of_another_size_is_refused():
    name = "train-images-idx3-ubyte"
    for wrong in (b"", content(name)[:-1], content("train-labels-idx1-ubyte"), b"\1" + content(name)[1:]):
        assert f"{len(wrong)} bytes" in refusal(mnist.idx, name, wrong, (28, 28))


def test_fetch_downloads_from_the_second_address_if_the_first_fails(here, served, tmp_path, capsys):
    fetch.main(fetch.Config(data=tmp_path / "new folder"))
    assert capsys.readouterr().out.count("\n") == 1
    for name in ("mnist", "cifar10"):
        same(data.load(name, tmp_path / "new folder"), data.load(name, here))


def test_fetch_replaces_what_is_altered_and_leaves_what_is_intact(here, served):
    intact, altered = (here / "mnist" / f"{name}.gz" for name in NAMES[:2])
    intact.write_bytes(gzip.compress(content(NAMES[0]), compresslevel=1))
    before = intact.read_bytes()
    altered.write_bytes(b"altered")
    (served / "cifar-10-binary.tar.gz").unlink()
    fetch.main(fetch.Config(data=here))
    assert intact.read_bytes() == before
    assert digest(altered.read_bytes()) == mnist.ARCHIVES[1].md5


def test_fetch_mends_a_folder_whose_unpacked_files_are_altered(here, served):
    (here / "cifar10" / "cifar-10-binary.tar.gz").unlink()
    (here / "cifar10" / cifar.TEST).write_bytes(b"altered")
    assert "is missing" in refusal(cifar.load, here)
    fetch.main(fetch.Config(data=here, names=("cifar10",)))
    assert len(cifar.load(here).test.labels) == 3


def test_without_a_folder_data_is_fetched_into_the_cache_once(served, tmp_path, monkeypatch):
    monkeypatch.delenv(files.FOLDER, raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / name)
    first = mnist.load(files.named(None))
    for path in served.iterdir():
        path.unlink()
    same(mnist.load(files.named(None)), first)
    assert len(list((tmp_path / "metafop" / "mnist").iterdir())) == 4


def test_an_address_that_gives_another_file_is_not_believed(served, tmp_path):
    (served / "train-images-idx3-ubyte.gz").write_bytes(b"another")
    message = refusal(fetch.main, fetch.Config(data=tmp_path / "new"))
    assert "/no/train-images-idx3-ubyte.gz (HTTPError) or http://" in message
    assert "(it gives another file)" in message
    assert list((tmp_path / "new" / "mnist").iterdir()) == []


def test_without_internet_the_address_the_md5_and_the_way_by_hand_are_named(tmp_path, monkeypatch):
    def retrieve(*_, **__):
        raise ConnectionError

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    message = refusal(fetch.main, fetch.Config(data=tmp_path))
    for part in (
        *mnist.ARCHIVES[0].addresses,
        mnist.ARCHIVES[0].md5,
        "into mnist/ of a folder",
        files.FOLDER,
    ):
        assert part in message


def test_a_folder_that_cannot_be_made_is_named(served, tmp_path):
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "inside"
    assert f"Cannot write to {inside}" in refusal(fetch.main, fetch.Config(data=inside))


@pytest.mark.parametrize("name", ["generated", "generated-digits"])
def test_generated_images_are_learned_but_not_by_heart(name):
    training, test = data.load(name)
    weights = torch.zeros(training.images[0].numel(), 10, requires_grad=True)
    flat, held = (x.images.flatten(1).double() / 64 - 2 for x in (training, test))
    for _ in range(50):
        (gradient,) = torch.autograd.grad(cross_entropy(flat @ weights, training.labels), weights)
        weights = (weights - 0.1 * gradient).detach().requires_grad_()
    assert 0.5 < ((held @ weights).argmax(1) == test.labels).double().mean() < 0.9


def test_generated_images_depend_on_the_seed_alone():
    once = generated.generated(shape=(2, 5, 7), classes=3, training=8, test=4, seed=1)
    torch.set_default_dtype(torch.float32)
    same(generated.generated(shape=(2, 5, 7), classes=3, training=8, test=4, seed=1), once)
    other = generated.generated(shape=(2, 5, 7), classes=3, training=8, test=4, seed=2)
    assert other.training.images.shape == once.training.images.shape == (8, 2, 5, 7)
    assert not torch.equal(other.training.images, once.training.images)
