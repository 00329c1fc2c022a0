"""L6: the networks of the sources, each with its initialisation named. No weights are ever downloaded.

>>> from theodolite import models
>>> model = models.build("F-200^2", inputs=64, seed=0)
>>> model.initialisation, models.count_parameters(model)  # 64·200 + 200 + 200·200 + 200 + 200·10 + 10
('xavier', 55210)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from theodolite._names import attach

if TYPE_CHECKING:
    from theodolite.models.dag import cnn_graph as cnn_graph
    from theodolite.models.dag import densenet_graph as densenet_graph
    from theodolite.models.dag import fcn_graph as fcn_graph
    from theodolite.models.dag import with_bottlenecks as with_bottlenecks
    from theodolite.models.dag import with_connections as with_connections
    from theodolite.models.dag import with_drops as with_drops
    from theodolite.models.dag import with_skips as with_skips
    from theodolite.models.feedforward import cnn as cnn
    from theodolite.models.feedforward import f_network as f_network
    from theodolite.models.feedforward import fcn as fcn
    from theodolite.models.feedforward import lenet5 as lenet5
    from theodolite.models.feedforward import lenet_mini as lenet_mini
    from theodolite.models.feedforward import myrtle5 as myrtle5
    from theodolite.models.feedforward import vgg11 as vgg11
    from theodolite.models.initialisation import count_parameters as count_parameters
    from theodolite.models.initialisation import initialise as initialise
    from theodolite.models.initialisation import ntk_parameterise as ntk_parameterise
    from theodolite.models.ntk import ntk_cnn as ntk_cnn
    from theodolite.models.ntk import ntk_fcn as ntk_fcn
    from theodolite.models.pretrained import load_weights as load_weights
    from theodolite.models.pretrained import resnet20_from as resnet20_from
    from theodolite.models.pretrained import stories260k_from as stories260k_from
    from theodolite.models.registry import build as build
    from theodolite.models.registry import names as names
    from theodolite.models.resnet import cifar_resnet as cifar_resnet
    from theodolite.models.resnet import resnet18 as resnet18
    from theodolite.models.resnet import resnet20 as resnet20
    from theodolite.models.resnet import wrn as wrn
    from theodolite.models.transformers import bert as bert
    from theodolite.models.transformers import gpt as gpt
    from theodolite.models.transformers import llama_decoder as llama_decoder
    from theodolite.models.transformers import llama_from_config as llama_from_config
    from theodolite.models.transformers import vision_transformer as vision_transformer

# Imported on first use, so listing the names does not load torch.
__all__, __getattr__, __dir__ = attach(__name__, __file__)
