"""Latent Dirichlet allocation: topics of words enumerated, topics of documents local."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

NUM_TOPICS, NUM_WORDS = 2, 6
rng = np.random.default_rng(8)
topics = np.array([[0.4, 0.3, 0.2, 0.05, 0.03, 0.02], [0.02, 0.03, 0.05, 0.2, 0.3, 0.4]])
shares = rng.dirichlet([1.0, 1.0], 10)
documents = np.stack([rng.choice(NUM_WORDS, 30, p=share @ topics) for share in shares])


def model(documents):
    count, length = documents.shape
    with pyro.plate("topics", NUM_TOPICS):
        topic_words = pyro.sample("topic_words", dist.Dirichlet(torch.ones(NUM_WORDS)))
    with pyro.plate("documents", count, dim=-1):
        doc_topics = pyro.sample("doc_topics", dist.Dirichlet(torch.ones(NUM_TOPICS)))
        with pyro.plate("words", length, dim=-2):
            topic = pyro.sample(
                "topic", dist.Categorical(doc_topics), infer={"enumerate": "parallel"}
            )
            pyro.sample("word", dist.Categorical(topic_words[topic]), obs=documents.T)
    # topics may change their names, a document's words may not
    pyro.deterministic("word_probs", doc_topics @ topic_words)


data = (torch.tensor(documents),)
right = ("word_probs",)
