"""How the user's model and loss are called: wrappers, outputs, precision, errors in plain words."""

from theodolite.problem.calling.model_call import Evaluation, KeepFloat64, Loss, ModelCall, copy_model, unwrap
from theodolite.problem.calling.outputs import Output, OutputChoice, main_output

__all__ = ["Evaluation", "KeepFloat64", "Loss", "ModelCall", "Output", "OutputChoice", "copy_model", "main_output", "unwrap"]
