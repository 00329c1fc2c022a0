"""L6: data sets from disk, and generated ones. Only experiments, examples, the command line and tests use them.

>>> from theodolite import data
>>> data.load("digits").classes_only((0, 2)).scaled().flat()
Dataset(digits: 284 train, 71 test, 64 float32, 2 classes)
"""

from theodolite._names import imported
from theodolite.data import generators as generators
from theodolite.data.base import DamagedDataError as DamagedDataError
from theodolite.data.base import DataError as DataError
from theodolite.data.base import Dataset as Dataset
from theodolite.data.base import FetchError as FetchError
from theodolite.data.base import MissingDataError as MissingDataError
from theodolite.data.base import UnknownDataError as UnknownDataError
from theodolite.data.catalog import Entry as Entry
from theodolite.data.catalog import File as File
from theodolite.data.catalog import Form as Form
from theodolite.data.catalog import names as names
from theodolite.data.fetch import Fetched as Fetched
from theodolite.data.fetch import fetch as fetch
from theodolite.data.loading import Listed as Listed
from theodolite.data.loading import Location as Location
from theodolite.data.loading import listing as listing
from theodolite.data.loading import load as load
from theodolite.data.loading import weights as weights
from theodolite.data.loading import where as where
from theodolite.data.objectives import MixedTokens as MixedTokens
from theodolite.data.objectives import ul2_objectives as ul2_objectives
from theodolite.data.readers import image_folder as image_folder
from theodolite.data.stories import Tokenizer as Tokenizer
from theodolite.data.stories import stories260k_config as stories260k_config
from theodolite.data.stories import stories260k_tokenizer as stories260k_tokenizer
from theodolite.data.text import Documents as Documents
from theodolite.data.text import Text as Text

__all__ = sorted(imported(__file__))
