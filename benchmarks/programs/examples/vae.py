"""A variational autoencoder: one latent code an image, by minibatches; for SVI, not for MCMC."""

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

images = torch.tensor(load_digits().data, dtype=torch.float32) / 16


class VAE(nn.Module):
    def __init__(self, codes=4):
        super().__init__()
        self.codes = codes
        self.decoder = nn.Sequential(nn.Linear(codes, 32), nn.Softplus(), nn.Linear(32, 64))

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("images", len(x)):
            code = dist.Normal(torch.zeros(len(x), self.codes), 1.0).to_event(1)
            z = pyro.sample("z", code)
            logits = self.decoder(z)
            # pixels are gray, between 0 and 1
            pixels = dist.Bernoulli(logits=logits, validate_args=False).to_event(1)
            pyro.sample("pixels", pixels, obs=x)


model = VAE().model
data = DataLoader(TensorDataset(images), batch_size=128, shuffle=True)
refused = "every latent of the model is one of each row"
