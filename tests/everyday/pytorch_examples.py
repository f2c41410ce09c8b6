"""Loops of the examples and tutorials of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from tests.everyday.loop import ALL, MONITOR, PRIVATE, RECORD, ROWS, USUAL, WATCH, Batch, Origin

examples = Origin("PyTorch examples")


def images(size: int, channels: int = 1, side: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, channels, side, side), torch.randint(3, (size,))


def pixels(size: int) -> Tensor:
    return torch.rand(size, 1, 4, 4)


def vectors(size: int, inputs: int = 4, outputs: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(size, inputs), torch.randn(size, outputs)


def labelled(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(3, (size,))


def mlp(inputs: int = 4, outputs: int = 3, hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


# ---- images ----


class MnistNet(nn.Module):
    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


@examples("MNIST, CNN with dropout", MnistNet, images, front_ends=ALL)
def mnist(model: nn.Module, batch: Batch) -> Tensor:
    data, target = batch
    return F.nll_loss(model(data), target)


class MnistRnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        out, _ = self.rnn(x.reshape(-1, 6, 6))
        return F.log_softmax(self.fc(out[:, -1]), dim=1)


@examples("MNIST, rows of pixels through an LSTM", MnistRnn, images, front_ends=ALL)
def mnist_rnn(model: nn.Module, batch: Batch) -> Tensor:
    data, target = batch
    return F.nll_loss(model(data), target)


class ForwardForward(nn.Module):
    """A layer that is trained by itself, on the goodness of positive and negative data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x / (x.norm(2, 1, keepdim=True) + 1e-4)))


@examples(
    "forward-forward: positive and negative data of one layer",
    ForwardForward,
    lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
)
def forward_forward(model: nn.Module, batch: Batch) -> Tensor:
    positive, negative = batch
    g_pos, g_neg = model(positive).pow(2).mean(1), model(negative).pow(2).mean(1)
    return F.softplus(torch.cat([-g_pos + 2.0, g_neg - 2.0])).mean()


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
        self.fc = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(torch.cat((self.body(one), self.body(other)), 1)))


@examples(
    "siamese pairs",
    Siamese,
    lambda size: (torch.randn(size, 1, 6, 6), torch.randn(size, 1, 6, 6), torch.randint(2, (size,)).double()),
    front_ends=ALL,
)
def siamese(model: nn.Module, batch: Batch) -> Tensor:
    images_1, images_2, targets = batch
    return F.binary_cross_entropy(model(images_1, images_2).squeeze(1), targets)


def triplet_batch(size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, 4), torch.randn(size, 4), torch.randn(size, 4)


@examples("siamese network with triplet loss", lambda: mlp(4, 5), triplet_batch, front_ends=(RECORD, MONITOR, PRIVATE))
def triplet(model: nn.Module, batch: Batch) -> Tensor:
    anchor, positive, negative = batch
    return nn.TripletMarginLoss(margin=1.0)(model(anchor), model(positive), model(negative))


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.conv2(F.relu(self.conv1(x))))


@examples(
    "super-resolution by pixel shuffle",
    SuperResolution,
    lambda size: (torch.rand(size, 1, 4, 4), torch.rand(size, 1, 8, 8)),
    front_ends=ALL,
)
def super_resolution(model: nn.Module, batch: Batch) -> Tensor:
    return nn.MSELoss()(model(batch[0]), batch[1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True))
        self.up = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.down(x)))


torch.manual_seed(3)
FEATURES = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()).double().requires_grad_(False)
STYLE = torch.rand(1, 3, 6, 6).double()


def gram_matrix(y: Tensor) -> Tensor:
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


@examples("fast neural style", Transformer, lambda size: torch.rand(size, 3, 6, 6), front_ends=USUAL)
def fast_neural_style(model: nn.Module, x: Tensor) -> Tensor:
    n_batch, gram_style = len(x), gram_matrix(FEATURES(STYLE.repeat(len(x), 1, 1, 1)))
    y, x_features = model(x), FEATURES(x)
    y_features = FEATURES(y)
    content_loss = F.mse_loss(y_features, x_features)
    style_loss = F.mse_loss(gram_matrix(y_features), gram_style[:n_batch, :, :])
    return 10.0 * content_loss + 100.0 * style_loss


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(16, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.fc3, self.fc4 = nn.Linear(3, 6), nn.Linear(6, 16)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 16))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def vae_loss(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 16), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


@examples("VAE", Vae, pixels, front_ends=(RECORD, WATCH, MONITOR, PRIVATE))
def vae(model: nn.Module, x: Tensor) -> Tensor:
    recon, mu, logvar = model(x)
    return vae_loss(recon, x, mu, logvar)


@examples("VAE, encode and decode called one after the other", Vae, pixels, front_ends=(RECORD,))
def vae_parts(model: Any, x: Tensor) -> Tensor:
    mu, logvar = model.encode(x.view(-1, 16))
    return vae_loss(model.decode(model.reparameterize(mu, logvar)), x, mu, logvar) / len(x)


# ---- two models ----


def make_gan() -> dict[str, nn.Module]:
    return {"generator": mlp(3, 4), "discriminator": nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1))}


def gan_batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 3)


@examples("DCGAN, step of the discriminator", make_gan, gan_batch, front_ends=(RECORD,))
def gan_discriminator(models: Any, batch: Batch) -> Tensor:
    real, noise = batch
    netG, netD = models["generator"], models["discriminator"]
    real_label, fake_label = torch.full((len(real),), 1.0), torch.full((len(real),), 0.0)
    errD_real = F.binary_cross_entropy_with_logits(netD(real).view(-1), real_label)
    errD_fake = F.binary_cross_entropy_with_logits(netD(netG(noise).detach()).view(-1), fake_label)
    return errD_real + errD_fake


@examples("DCGAN, step of the discriminator, two calls of backward", make_gan, gan_batch, front_ends=(RECORD,))
def gan_discriminator_twice(models: Any, batch: Batch) -> None:
    real, noise = batch
    netG, netD = models["generator"], models["discriminator"]
    F.binary_cross_entropy_with_logits(netD(real).view(-1), torch.ones(len(real))).backward()
    F.binary_cross_entropy_with_logits(netD(netG(noise).detach()).view(-1), torch.zeros(len(real))).backward()


@examples("DCGAN, step of the generator", make_gan, gan_batch, front_ends=(RECORD,))
def gan_generator(models: Any, batch: Batch) -> Tensor:
    _, noise = batch
    output = models["discriminator"](models["generator"](noise)).view(-1)
    return F.binary_cross_entropy_with_logits(output, torch.ones(len(noise)))


# ---- reinforcement learning ----


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1, self.action_head, self.value_head = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def episode(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(size, 4), torch.randint(3, (size,)), torch.randn(size)


@examples("REINFORCE on the steps of an episode", lambda: mlp(4, 3), episode, front_ends=(*USUAL, PRIVATE))
def reinforce(model: nn.Module, batch: Batch) -> Tensor:
    states, actions, returns = batch
    log_probs = Categorical(logits=model(states)).log_prob(actions)
    return (-log_probs * returns).sum()


@examples("actor-critic, policy and value head", Policy, episode, front_ends=USUAL)
def actor_critic(model: nn.Module, batch: Batch) -> Tensor:
    states, actions, returns = batch
    probs, values = model(states)
    advantage = returns - values.squeeze(-1).detach()
    policy_losses = -Categorical(probs).log_prob(actions) * advantage
    value_losses = F.smooth_l1_loss(values.squeeze(-1), returns, reduction="none")
    return policy_losses.sum() + value_losses.sum()


@examples(
    "actor and critic as two models",
    lambda: {"actor": mlp(4, 3), "critic": mlp(4, 1)},
    episode,
    front_ends=(RECORD,),
)
def two_model_actor_critic(models: Any, batch: Batch) -> Tensor:
    states, actions, returns = batch
    values = models["critic"](states).squeeze(-1)
    log_probs = Categorical(logits=models["actor"](states)).log_prob(actions)
    return -(log_probs * (returns - values.detach())).mean() + F.mse_loss(values, returns)


class Gaussian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = mlp(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Normal:
        return Normal(self.mean(x), self.log_std.exp())


def continuous_episode(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(size, 4), torch.randn(size, 2), torch.randn(size)


@examples("Gaussian policy with a learned deviation", Gaussian, continuous_episode, front_ends=USUAL)
def gaussian_policy(model: nn.Module, batch: Batch) -> Tensor:
    states, actions, advantages = batch
    return -(model(states).log_prob(actions).sum(-1) * advantages).mean()


def surrogate(model: nn.Module, batch: Batch) -> Tensor:
    states, actions, advantages = batch
    log_prob = model(states).log_prob(actions).sum(-1)
    ratio = (log_prob - log_prob.detach() + 0.1 * torch.sign(advantages)).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


@examples(
    "PPO with a clipped ratio and an entropy bonus on the learned deviation",
    Gaussian,
    continuous_episode,
    own=surrogate,
)
def ppo_control(model: Any, batch: Batch) -> Tensor:
    return surrogate(model, batch) - 0.01 * Normal(torch.zeros(2), model.log_std.exp()).entropy().sum(-1)


@examples("PPO, entropy of the policy at each state", Gaussian, continuous_episode)
def ppo_entropy(model: nn.Module, batch: Batch) -> Tensor:
    states, actions, advantages = batch
    policy = model(states)
    log_prob = policy.log_prob(actions).sum(-1)
    ratio = (log_prob - log_prob.detach() + 0.1 * torch.sign(advantages)).exp()
    policy_loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    return policy_loss - 0.01 * policy.entropy().sum(-1).mean()


@examples("DQN with a target network", lambda: mlp(4, 3), lambda size: (*episode(size), torch.randn(size, 4)))
def dqn(model: nn.Module, batch: Batch) -> Tensor:
    state, action, reward, next_state = batch
    state_action_values = model(state).gather(1, action.unsqueeze(1))
    with torch.no_grad():
        next_state_values = model(next_state).max(1).values
    expected = next_state_values * 0.9 + reward
    return nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))


# ---- sequences ----


class WordRnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(11, 5), nn.LSTM(5, 6), nn.Linear(6, 11)

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, 6), weight.new_zeros(1, bsz, 6)

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return F.log_softmax(self.decoder(output).view(-1, 11), dim=1), hidden


def word_batch(size: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(11, (7, size))
    return text[:-1], text[1:]


def take_column(batch: Batch, n: int) -> Batch:
    return tuple(tensor[:, n : n + 1] for tensor in batch)


def repackage_hidden(hidden: Any) -> Any:
    return hidden.detach() if isinstance(hidden, Tensor) else tuple(repackage_hidden(v) for v in hidden)


@examples(
    "word language model, LSTM with hidden states, samples in dimension 1",
    WordRnn,
    word_batch,
    take=take_column,
    options={"batch_dim": 1},
    front_ends=(RECORD, WATCH, MONITOR),
)
def word_language_model(model: Any, batch: Batch) -> Tensor:
    data, targets = batch
    hidden = repackage_hidden(model.init_hidden(data.size(1)))
    output, hidden = model(data, hidden)
    return nn.NLLLoss()(output, targets.reshape(-1))


class WordTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(11, 8), nn.Parameter(torch.zeros(12, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(8, 11)

    def forward(self, src: Tensor) -> Tensor:
        mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        output = self.encoder(self.embed(src) * 8**0.5 + self.pos[: len(src)], mask)
        return F.log_softmax(self.decoder(output), dim=-1)


@examples(
    "word language model, transformer, samples in dimension 1",
    WordTransformer,
    word_batch,
    take=take_column,
    options={"batch_dim": 1},
)
def word_transformer(model: nn.Module, batch: Batch) -> Tensor:
    data, targets = batch
    output = model(data).view(-1, 11)
    return nn.NLLLoss()(output, targets.reshape(-1))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 5), nn.LSTMCell(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, future: int = 0) -> Tensor:
        outputs = []
        h_t, c_t = torch.zeros(x.size(0), 5), torch.zeros(x.size(0), 5)
        h_t2, c_t2 = torch.zeros(x.size(0), 5), torch.zeros(x.size(0), 5)
        for input_t in x.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        for _ in range(future):
            h_t, c_t = self.lstm1(outputs[-1], (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            outputs += [self.linear(h_t2)]
        return torch.cat(outputs, dim=1)


@examples(
    "time series forecasting with LSTM cells",
    Sequence,
    lambda size: (torch.randn(size, 4), torch.randn(size, 6)),
    front_ends=(RECORD, WATCH, MONITOR, PRIVATE),
)
def time_sequence_prediction(model: nn.Module, batch: Batch) -> Tensor:
    return nn.MSELoss()(model(batch[0], future=2), batch[1])


class Snli(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.projection = nn.Embedding(11, 6), nn.Linear(6, 5)
        self.encoder = nn.LSTM(5, 4, num_layers=2, bidirectional=True)
        self.out = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))

    def encode(self, words: Tensor) -> Tensor:
        embedded = F.relu(self.projection(self.embed(words)))
        state = embedded.new_zeros(4, words.size(1), 4)
        _, (ht, _) = self.encoder(embedded, (state, state))
        return ht[-2:].transpose(0, 1).contiguous().view(words.size(1), -1)

    def forward(self, premise: Tensor, hypothesis: Tensor) -> Tensor:
        return self.out(torch.cat([self.encode(premise), self.encode(hypothesis)], 1))


def snli_batch(size: int) -> dict[str, Tensor]:
    texts = {"premise": torch.randint(11, (6, size)), "hypothesis": torch.randint(11, (5, size))}
    return {**texts, "label": torch.randint(3, (size,))}


@examples(
    "SNLI classifier of premise and hypothesis",
    Snli,
    snli_batch,
    take=lambda b, n: {k: v[n : n + 1] if k == "label" else v[:, n : n + 1] for k, v in b.items()},
    options={"batch_dim": {"premise": 1, "hypothesis": 1}},
)
def snli(model: nn.Module, batch: Batch) -> Tensor:
    answer = model(premise=batch["premise"], hypothesis=batch["hypothesis"])
    return nn.CrossEntropyLoss()(answer, batch["label"])


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(11, 5), nn.Embedding(11, 5)
        self.encoder, self.decoder = nn.GRU(5, 6, batch_first=True), nn.GRU(5, 6, batch_first=True)
        self.attention, self.out = nn.Linear(6, 6), nn.Linear(12, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded, hidden = self.encoder(self.source(source))
        outputs = []
        for i in range(target.size(1)):
            step, hidden = self.decoder(self.target(target[:, i : i + 1]), hidden)
            weights = torch.bmm(self.attention(step), encoded.transpose(1, 2)).softmax(-1)
            outputs.append(self.out(torch.cat([step, torch.bmm(weights, encoded)], -1)))
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


@examples(
    "translation with a GRU and attention, teacher forcing",
    Seq2Seq,
    lambda size: (torch.randint(11, (size, 5)), torch.randint(11, (size, 4))),
)
def translation(model: nn.Module, batch: Batch) -> Tensor:
    source, target = batch
    outputs = model(source, target)
    return nn.NLLLoss()(outputs[:, :-1].reshape(-1, 11), target[:, 1:].reshape(-1))


# ---- bags, graphs ----


class TextClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.EmbeddingBag(11, 5, sparse=False), nn.Linear(5, 3)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.fc(self.embedding(text, offsets))


def bags(size: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths = [2 + n % 3 for n in range(size)]
    offsets = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return torch.randint(3, (size,)), torch.randint(11, (sum(lengths),)), offsets


def take_bag(batch: Batch, n: int) -> Batch:
    label, text, offsets = batch
    ends = [*offsets.tolist(), len(text)]
    return label[n : n + 1], text[ends[n] : ends[n + 1]], torch.tensor([0])


@examples("bag of words with offsets", TextClassifier, bags, take=take_bag)
def text_classification(model: nn.Module, batch: Batch) -> Tensor:
    label, text, offsets = batch
    return nn.CrossEntropyLoss()(model(text, offsets), label)


SHARED_GRAPH = {"record": "mixe|combine"}


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return F.log_softmax(adjacency @ self.two(F.relu(adjacency @ self.one(x))), dim=1)


def graph(size: int) -> tuple[Tensor, Tensor, Tensor]:
    adjacency = (torch.rand(size + 2, size + 2) < 0.5).double() + torch.eye(size + 2)
    return torch.randn(size + 2, 4), adjacency / adjacency.sum(1, keepdim=True), torch.randint(3, (size,))


def take_node(batch: Batch, n: int) -> Batch:
    return batch[0], batch[1], {"node": n, "label": batch[2][n : n + 1]}


@examples(
    "GCN on one graph, the nodes as samples",
    Gcn,
    graph,
    take=take_node,
    front_ends=(ROWS, RECORD),
    refused=SHARED_GRAPH,
)
def gcn(model: nn.Module, batch: Batch) -> Tensor:
    x, adjacency, labels = batch
    log_probs = model(x, adjacency)
    if isinstance(labels, dict):  # one node of the loop over nodes
        return F.nll_loss(log_probs[labels["node"] : labels["node"] + 1], labels["label"])
    return F.nll_loss(log_probs[: len(labels)], labels, reduction="none")


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.attention, self.out = nn.Linear(4, 6), nn.Linear(12, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.fc(x)
        pairs = torch.cat([h[:, None].expand(-1, len(h), -1), h[None].expand(len(h), -1, -1)], -1)
        scores = F.leaky_relu(self.attention(pairs).squeeze(-1)).masked_fill(adjacency == 0, float("-inf"))
        return F.log_softmax(self.out(F.elu(scores.softmax(1) @ h)), dim=1)


examples(
    "GAT on one graph, the nodes as samples",
    Gat,
    graph,
    take=take_node,
    front_ends=(ROWS, RECORD),
    refused=SHARED_GRAPH,
)(gcn)


# ---- distillation, fine-tuning ----


TEACHER = mlp(4, 3).double()


@examples("knowledge distillation with a temperature", lambda: mlp(4, 3), labelled, front_ends=ALL)
def distillation(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    T = 2.0
    with torch.no_grad():
        teacher_logits = TEACHER(inputs)
    student_logits = model(inputs)
    soft_targets = F.softmax(teacher_logits / T, dim=-1)
    soft_prob = F.log_softmax(student_logits / T, dim=-1)
    soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
    return 0.25 * soft_loss + 0.75 * F.cross_entropy(student_logits, labels)


@examples("knowledge distillation by kl_div, batchmean, times T squared", lambda: mlp(4, 3), labelled, sizes=(4, 16))
def distillation_kl(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    T = 4
    logits = model(inputs)
    soft = F.kl_div((logits / T).log_softmax(1), (TEACHER(inputs) / T).softmax(1).detach(), reduction="batchmean")
    return soft * T**2 + F.cross_entropy(logits, labels)


def make_finetuned() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    body[1].running_mean.normal_(), body[1].running_var.uniform_(0.5, 2.0)
    return nn.Sequential(body.requires_grad_(False).eval(), nn.Linear(4, 3))


@examples("transfer learning: a frozen body with BatchNorm in evaluation mode", make_finetuned, images)
def transfer_learning(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return nn.CrossEntropyLoss()(model(inputs), labels)


def make_batchnorm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


BATCH_NORM = {"all": "BatchNorm"}
examples(
    "CNN with BatchNorm in training mode", make_batchnorm, images, front_ends=(RECORD, PRIVATE), refused=BATCH_NORM
)(transfer_learning)
examples("CNN with BatchNorm in evaluation mode", lambda: make_batchnorm().eval(), images, front_ends=(RECORD, WATCH))(
    transfer_learning
)
examples(
    "CNN with BatchNorm in training mode, contributions asked for",
    make_batchnorm,
    images,
    front_ends=(RECORD, MONITOR),
    options={"coupled": "contributions"},
    contributions=True,
)(transfer_learning)
