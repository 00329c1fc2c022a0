"""L6: data sets from disk, and generated ones. Only experiments, examples, the command line and tests use them.

>>> from theodolite import data
>>> data.load("digits").classes_only((0, 2)).scaled().flat()
Dataset(digits: 284 train, 71 test, 64 float32, 2 classes)
"""

from theodolite.data import generators
from theodolite.data.base import DamagedDataError, DataError, Dataset, FetchError, MissingDataError, UnknownDataError
from theodolite.data.catalog import Entry, File, Form, names
from theodolite.data.fetch import Fetched, fetch
from theodolite.data.loading import Listed, Location, listing, load, weights, where
from theodolite.data.readers import image_folder
from theodolite.data.stories import Tokenizer, stories260k_config, stories260k_tokenizer
from theodolite.data.text import Documents, Text

__all__ = [
    "DamagedDataError",
    "DataError",
    "Dataset",
    "Documents",
    "Entry",
    "FetchError",
    "Fetched",
    "File",
    "Form",
    "Listed",
    "Location",
    "MissingDataError",
    "Text",
    "Tokenizer",
    "UnknownDataError",
    "fetch",
    "generators",
    "image_folder",
    "listing",
    "load",
    "names",
    "stories260k_config",
    "stories260k_tokenizer",
    "weights",
    "where",
]
