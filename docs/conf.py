"""Settings of the documentation. The reference is written from the package's own table of contents by `reference_pages.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import reference_pages  # noqa: E402, it lies beside this file
import sources_page  # noqa: E402, so does this

import theodolite  # noqa: E402

# The scripts of the gallery run one after the other on one thread each, as their tests do, and draw nowhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

project = "Theodolite"
author = "The Theodolite developers"
copyright = author
version = release = theodolite.__version__
language = "en_GB"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["_build", "snippets", "gallery/**/*.ipynb", "gallery/**/*.py", "**/sg_execution_times.rst"]
default_role = "code"
highlight_language = "python"
nitpicky = False

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_param = False  # one entry may describe several arguments
napoleon_use_rtype = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "alabaster"
html_title = f"Theodolite {release}"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["theodolite.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_permalinks_icon = "#"
html_theme_options = {
    "description": f"Survey how a neural network trains. Version\u00a0{release}.",
    "page_width": "900px",  # narrower windows get one column; the style sheet sets the real width
    "sidebar_width": "230px",
    "fixed_sidebar": True,
    "show_powered_by": False,
    "show_relbars": False,
    "font_family": "system-ui, sans-serif",
    "head_font_family": "system-ui, sans-serif",
    "code_font_family": "ui-monospace, monospace",
    "font_size": "16px",
    "code_font_size": "0.875em",
}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}

sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_.*\.py$",
    "plot_gallery": "True",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "remove_config_comments": True,
    "capture_repr": (),
    "doc_module": (),
    "backreferences_dir": None,
    "within_subsection_order": "FileNameSortKey",
    "thumbnail_size": (400, 250),
}


def setup(app):
    reference_pages.write(Path(app.srcdir))
    sources_page.write(Path(app.srcdir))
    app.connect("autodoc-process-docstring", reference_pages.escape, priority=100)  # before napoleon
    return {"parallel_read_safe": True}
