"""The table of data sets: what each one is, its files and checksums, its terms, and how it lies on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from theodolite.arguments import a_text
from theodolite.data import readers
from theodolite.data.base import DataError, UnknownDataError
from theodolite.data.readers import read_arrays
from theodolite.text import nearest

Kind = Literal["images", "text", "documents", "audio", "weights"]


@dataclass(frozen=True)
class File:
    """One file as published: its name on disk, its checksum `sha256:...` or `md5:...`, its address if public."""

    name: str
    digest: str
    url: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Form:
    """One way in which a data set lies in a folder.

    `needs` has an item for each file or folder that must be there: the names (or patterns) it may have.
    `read` gets the paths found, in that order, and those of its keyword arguments that `options` lists.
    Names that say nothing of the data set (`train.bin`) count only in a folder of its own.
    """

    needs: tuple[tuple[str, ...], ...]
    read: Callable[..., Any]
    own_folder: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One data set: forms in the order in which they are looked for, files, terms.

    `folders` are the names its own folder may have. `bring` tells how to provide what cannot be fetched.
    """

    name: str
    kind: Kind
    title: str
    terms: str
    forms: tuple[Form, ...]
    files: tuple[File, ...] = ()
    folders: tuple[str, ...] = ()
    bring: str = ""

    @property
    def fetchable(self) -> bool:
        return any(file.url for file in self.files)


GROUP = "theodolite.data"  # entry points of other packages: the name of a data set -> an Entry


def names() -> list[str]:
    """All names, first those of this package."""
    return [*_TABLE, *(name for name in _others() if name not in _TABLE)]


def get(name: str) -> Entry:
    """The entry of that name."""
    a_text("name", name)
    if name in _TABLE:
        return _TABLE[name]
    if name in _others():
        return _load(_others()[name])
    close = ", ".join(nearest(name, names()))
    raise UnknownDataError(f"There is no data set of the name {name!r}. Nearest names: {close}. All names: theodolite data list.")


@cache
def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> Entry:
    try:
        entry = point.load()
    except Exception as error:  # whatever a foreign module raises
        raise DataError(f"The data set {point.name!r} of {point.value} cannot be imported: {error!r}.") from error
    if not isinstance(entry, Entry):
        raise DataError(f"The data set {point.name!r} of {point.value} must be a theodolite.data.Entry. Got {entry!r:.80}.")
    return entry


DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
AG_NEWS = ("World", "Sports", "Business", "Sci/Tech")
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
TORONTO = "https://www.cs.toronto.edu/~kriz/"
NO_LICENCE = "no licence stated; cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"


def _files(base: str, *rows: tuple[str, str, int | None]) -> tuple[File, ...]:
    return tuple(File(name, digest, base + name, size) for name, digest, size in rows)


def _npz(name: str, shape: readers.Shape, classes: tuple[str, ...] = ()) -> tuple[Form, Form]:
    read = partial(readers.read_npz, shape=shape, classes=classes)
    return Form(((f"{name}.npz",),), read), Form(((f"{name}_subset.npz",),), read)


def _idx(name: str, title: str, terms: str, classes: tuple[str, ...], folder: str, base: str, *sums: tuple[str, int]) -> Entry:
    """A set in the format of MNIST; `sums` are the checksums and sizes of its four files and of the .npz."""
    form = Form(
        tuple((f"{stem}.gz", stem) for stem in IDX),
        partial(readers.read_idx_set, shape=(1, 28, 28), classes=classes),
        own_folder=True,
    )
    files = _files(base, *((f"{stem}.gz", *each) for stem, each in zip(IDX, sums[:4], strict=True)))
    files += (File(f"{name}.npz", sums[4][0], size=sums[4][1]),)
    return Entry(name, "images", title, terms, (form, *_npz(name, (1, 28, 28), classes)), files, (name, folder))


def _cifar(
    count: int, folder: str, files: tuple[str, ...], read: Callable[..., Any], classes: tuple[str, ...], *sums: tuple[str, int]
) -> Entry:
    """CIFAR-10 or CIFAR-100; `sums` are the checksums and sizes of the archive and of the .npz."""
    whole, subset = sums
    name, archive = f"cifar{count}", f"cifar-{count}-binary.tar.gz"
    unpacked = Form(tuple((file,) for file in files), read, own_folder=True)
    forms = (Form(((archive,),), read), unpacked, *_npz(name, (3, 32, 32), classes))
    parts = (*_files(TORONTO, (archive, *whole)), File(f"{name}_subset.npz", subset[0], size=subset[1]))
    title = f"CIFAR-{count}: 60000 pictures of {count} things, 32x32 colour"
    return Entry(name, "images", title, NO_LICENCE, forms, parts, (name, folder, f"{name}/{folder}"))


_MNIST = _idx(
    "mnist",
    "MNIST: 70000 handwritten digits, 28x28 grey",
    "CC BY-SA 3.0 (Y. LeCun, C. Cortes)",
    DIGITS,
    "MNIST/raw",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    ("sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
    ("sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
    ("sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
    ("sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
    ("sha256:a7ca5941ed14a4e275a85c70d92dc1ec30216050a9a8efb4cd648939b6ce6b80", 9_477_731),
)
_FASHION_MNIST = _idx(
    "fashion_mnist",
    "Fashion-MNIST: 70000 pieces of clothing, 28x28 grey",
    "MIT, Zalando SE",
    FASHION,
    "FashionMNIST/raw",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ("sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
    ("sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
    ("sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
    ("sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
    ("sha256:26ddcaeea2ffe7bf63a3e81a2bc12a5894bdab7e97a6511bf870f78fa1f3a3d8", 26_447_519),
)
_CIFAR10 = _cifar(
    10,
    "cifar-10-batches-bin",
    (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    partial(readers.read_cifar10, classes=CIFAR10),
    CIFAR10,
    ("sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd", 170_052_171),
    ("sha256:0c1b0ac4b3e761320e40bf4cf285d8a944a90f0e876de78056e60ddea05ef477", 34_883_514),
)
_CIFAR100 = _cifar(
    100,
    "cifar-100-binary",
    ("train.bin", "test.bin", "fine_label_names.txt"),
    readers.read_cifar100,
    (),
    ("sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec", 168_513_733),
    ("sha256:3a9604e1d8d68fc5c68ac4ba6e4e177f353322d39bef935099a1c403be765f26", 14_019_901),
)
_SVHN = Entry(
    "svhn",
    "images",
    "SVHN: 99289 house-number digits, cropped, 32x32 colour",
    "non-commercial use only; cite Netzer et al., NIPS workshop 2011",
    (
        Form((("train_32x32.mat",), ("test_32x32.mat",)), partial(readers.read_svhn, classes=DIGITS)),
        *_npz("svhn", (3, 32, 32), DIGITS),
    ),
    (
        *_files(
            "http://ufldl.stanford.edu/housenumbers/",
            ("train_32x32.mat", "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8", 182_040_794),
            ("test_32x32.mat", "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b", 64_275_384),
        ),
        File("svhn_subset.npz", "sha256:47365dc20a8c08f79cfa2ef9bc3b7ff6eab6d3fcf47aeba398ca8183d8583f69", size=24_822_917),
    ),
    ("svhn",),
)
_USPS = Entry(
    "usps",
    "images",
    "USPS: 9298 handwritten digits, 16x16 grey",
    "no licence stated; cite J. Hull, IEEE TPAMI 16(5), 1994",
    # A file may be called like the folder, so only a folder of its own counts.
    (Form((("usps.bz2", "usps"), ("usps.t.bz2", "usps.t")), partial(readers.read_usps, classes=DIGITS), own_folder=True),),
    _files(
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/",
        ("usps.bz2", "md5:ec16c51db3855ca6c91edd34d0e9b197", None),
        ("usps.t.bz2", "md5:8ea070ee2aca1ac39742fdd1ef5ed118", None),
    ),
    ("usps",),
)
_DIGITS = Entry(
    "digits",
    "images",
    "scikit-learn digits: 1797 handwritten digits, 8x8 grey, always there",
    "CC BY 4.0 (E. Alpaydin, C. Kaynak, UCI repository)",
    (Form((), readers.read_digits),),
)
_IMAGENET = Entry(
    "imagenet",
    "images",
    "ImageNet, or any tree train/CLASS/*.jpg with val/CLASS/*.jpg",
    "research only, may not be passed on; https://image-net.org/download",
    (Form((("train",), ("val", "test")), readers.read_tree, own_folder=True, options=("size", "per_class")),),
    folders=("imagenet",),
    bring="Provide a folder with train/CLASS/*.jpg and val/CLASS/*.jpg",
)
_CELEBA = Entry(
    "celeba",
    "images",
    "CelebA: 202599 faces with 40 attributes",
    "non-commercial research only, may not be passed on; https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
    (
        Form(
            (("list_attr_celeba.txt", "Anno/list_attr_celeba.txt"), ("img_align_celeba", "Img/img_align_celeba")),
            readers.read_celeba,
            options=("attribute", "size", "limit"),
        ),
    ),
    folders=("celeba", "CelebA"),
    bring="Provide a folder with list_attr_celeba.txt and the folder img_align_celeba of .jpg files",
)
_FSDD = Entry(
    "fsdd",
    "audio",
    "Free Spoken Digit Dataset: 3000 recordings of 6 speakers, 8 kHz",
    "CC BY-SA 4.0 (Z. Jackson et al.)",
    (Form((("recordings", "[0-9]_*_*.wav"),), readers.read_fsdd, own_folder=True, options=("length",)),),
    folders=("fsdd", "free-spoken-digit-dataset"),
    bring="Provide a folder of {digit}_{speaker}_{take}.wav files, or clone "
    "https://github.com/Jakobovski/free-spoken-digit-dataset, which holds them in recordings",
)


def _one_text(name: str, title: str, terms: str, files: tuple[File, ...]) -> Entry:
    form = Form(((f"{name}.txt.gz", f"{name}.txt"),), readers.read_one)
    return Entry(name, "text", title, terms, (form,), files, (name,))


_SHAKESPEARE = _one_text(
    "tinyshakespeare",
    "tiny Shakespeare: 1115394 characters of plays",
    "public domain",
    (
        File(
            "tinyshakespeare.txt",
            "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            1_115_394,
        ),
        File("tinyshakespeare.txt.gz", "sha256:13125fe8f49092165d7d489e3944db52d1ba546e64a60080cc9523bcd0c5e46a", size=433_884),
    ),
)
_STORIES = _one_text(
    "tinystories_sample",
    "a sample of TinyStories: 37693 words of children's stories",
    "CDLA-Sharing-1.0 (R. Eldan, Y. Li)",
    (File("tinystories_sample.txt.gz", "sha256:fddb3a84bc443c7e5c4eb6776ea237d8ba68801b0da18a32461614e8b4dd46aa", size=62_523),),
)
_WIKITEXT = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/"
_WIKITEXT2 = Entry(
    "wikitext2",
    "text",
    "WikiText-2: 2.6 million words of Wikipedia, rare ones as <unk>",
    "CC BY-SA 3.0 (Wikipedia; S. Merity et al., 2016)",
    (
        Form(tuple((f"wikitext2_{p}.txt.gz", f"wikitext2_{p}.txt") for p in ("train", "valid", "test")), readers.read_three),
        Form((("train.txt",), ("valid.txt",), ("test.txt",)), readers.read_three, own_folder=True),
    ),
    (
        *(
            File(f"wikitext2_{part}.txt", f"sha256:{digest}", f"{_WIKITEXT}{part}.txt", size)
            for part, digest, size in (
                ("train", "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f", 10_797_148),
                ("valid", "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8", 1_121_681),
                ("test", "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0", 1_256_449),
            )
        ),
        File("wikitext2_train.txt.gz", "sha256:fc9790d81cb8f08d3cfc5765fc8e67dcf8fe00845c1365914b81da130bbd79ce", size=3_677_142),
        File("wikitext2_valid.txt.gz", "sha256:3cdd8cb5bb349a05840c7c3bef9578d90d64df77e27e0c25c033ba9342757ee3", size=373_475),
        File("wikitext2_test.txt.gz", "sha256:688887879b4b526692cb2e423a516dcc5f6584a01fd3f33a8e164fbed2de8090", size=410_944),
    ),
    ("wikitext2", "wikitext-2"),
)
_AG_NEWS = Entry(
    "ag_news",
    "documents",
    "AG NEWS: 127600 news items in 4 classes",
    "non-commercial use; cite X. Zhang, J. Zhao, Y. LeCun, NIPS 2015",
    (Form((("train.csv",), ("test.csv",)), partial(readers.read_ag_news, classes=AG_NEWS), own_folder=True),),
    _files(
        "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/",
        ("train.csv", "md5:b1a00f826fdfbd249f79597b59e1dc12", 29_470_338),
        ("test.csv", "md5:d52ea96a97a2d943681189a97654912d", 1_857_427),
    ),
    ("ag_news", "ag_news_csv"),
)
_RESNET20 = Entry(
    "resnet20_cifar10",
    "weights",
    "ResNet-20 trained on CIFAR-10, 269722 parameters",
    "BSD 2-clause (Y. Idelbayev)",
    (Form((("resnet20_cifar10.npz",),), read_arrays),),
    (File("resnet20_cifar10.npz", "sha256:ae55ce549d90098bb944a08447b865e43227107e5f982c92c69bfaeff42f9925", size=1_027_081),),
    ("resnet20_cifar10",),
)
_STORIES260K = Entry(
    "stories260k",
    "weights",
    "a Llama of 260032 parameters trained on TinyStories",
    "MIT (A. Karpathy)",
    (Form((("stories260k.npz",), ("stories260k.json",)), lambda weights, vocabulary: read_arrays(weights)),),
    (
        File("stories260k.npz", "sha256:24f940f779d294fbf34a147f2f03c93ef1a0a218af4776386d549ad8dd0cde4f", size=960_415),
        File("stories260k.json", "sha256:0ee972c43dafe82b08a3ea94f3ee537228f61374e0679b19831940f30ff27512", size=9_755),
    ),
    ("stories260k",),
)

_TABLE = {
    entry.name: entry
    for entry in (
        *(_MNIST, _FASHION_MNIST, _CIFAR10, _CIFAR100, _SVHN, _DIGITS, _USPS, _IMAGENET, _CELEBA),
        *(_WIKITEXT2, _SHAKESPEARE, _STORIES, _AG_NEWS, _FSDD, _RESNET20, _STORIES260K),
    )
}
