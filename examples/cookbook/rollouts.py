"""Train a policy that pushes a point towards 0: which rollouts moved it, and a filter of those with broken rewards."""

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import persample

ROLLOUTS, STEPS = 64, 10


class Policy(nn.Module):
    """Gaussian actions with a learned deviation, which is one weight for all states."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor) -> Normal:
        return Normal(self.mean(states), self.log_std.exp())


@torch.no_grad()
def play(policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """States and actions of all steps, and the rewards: `(rollouts, steps)` each."""
    positions, actions = [2 * torch.randn(ROLLOUTS, 1)], []
    for _ in range(STEPS):
        actions.append(policy(positions[-1]).sample())
        positions.append(positions[-1] + 0.5 * actions[-1])
    return torch.cat(positions[:-1], 1), torch.cat(actions, 1), -torch.cat(positions[1:], 1).abs()


def train(has_filter: bool) -> str:
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    for _ in range(60):
        states, actions, rewards = play(policy)
        rewards = torch.where(torch.rand(ROLLOUTS, 1) < 0.05, 300 * torch.randn(ROLLOUTS, 1), rewards)
        returns = rewards.flip(1).cumsum(1).flip(1)
        advantages = (returns - returns.median(0).values) / STEPS
        with persample.record(policy, units=STEPS) as grads:  # STEPS consecutive samples are one rollout
            log_prob = policy(states.view(-1, 1)).log_prob(actions.view(-1, 1))
            (-log_prob * advantages.view(-1, 1)).mean().backward()
        kept = (grads.norms() < (5 if has_filter else torch.inf) * grads.norms().median()).float()
        step = grads.sum(kept / kept.sum())
        for name, p in policy.named_parameters():
            p.grad = step[name]
        optimizer.step()
    moved, reward = (grads.dot(step).abs() * kept).topk(3).indices.tolist(), float(play(policy)[2].mean())
    return f"filter {has_filter!s:5}  reward {reward:6.2f}   most of the last step: rollouts {moved}"


def main() -> None:
    print(train(has_filter=False), train(has_filter=True), sep="\n")


if __name__ == "__main__":
    main()
