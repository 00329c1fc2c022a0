"""The training that is watched: what a step passes by (`recorder`), and the model as measurable problems (`watched_model`)."""
