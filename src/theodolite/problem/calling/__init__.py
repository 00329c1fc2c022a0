"""How the user's model and loss are called: wrappers, outputs, precision, errors in plain words."""

from theodolite.problem.calling.model_call import Evaluation, KeepFloat64, Loss, ModelCall, copy_model, main_output, unwrap

__all__ = ["Evaluation", "KeepFloat64", "Loss", "ModelCall", "copy_model", "main_output", "unwrap"]
