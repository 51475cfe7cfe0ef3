"""The model `package:tiny`: a Llama of 0.9M parameters, warm enough that reinforcement has something to work on."""
