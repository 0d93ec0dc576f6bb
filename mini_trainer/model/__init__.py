"""Models: a model directory becomes a checked and sharded model that trains.

In: a directory in the Hugging Face format, options, a `World`. Out: a model with its method (methods/), its optimizer
(optim/), and scores of data sets without gradients (scoring/).
"""
