"""An order of claims to compare, for the scheduler in this process and as options of `orca up`."""

from dataclasses import dataclass

from orca.pool.order.order_rules import Drop, Order, OrderRules, Utility


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderChoice:
    """An order of claims and its controls."""

    order: Order
    utility: Utility = Utility.EQUAL
    drop: Drop = Drop.CERTAIN
    eta_percent: int | None = None  # order deadline only; None: the default
    patience_s: int = 30

    @property
    def name(self) -> str:
        return self.order.value if self.eta_percent is None else f"{self.order.value}, eta {self.eta_percent} %"

    @property
    def rules(self) -> OrderRules | None:
        """Return the rules of the scheduler; None for arrival."""
        if self.order is Order.ARRIVAL:
            return None
        eta = {} if self.eta_percent is None else {"eta": self.eta_percent / 100}
        patience_ms = 1_000 * self.patience_s
        return OrderRules(order=self.order, utility=self.utility, drop=self.drop, patience_ms=patience_ms, **eta)

    @property
    def words(self) -> list[str]:
        """Return the options of `orca up`."""
        words = ["--order", self.order.value]
        if self.order is not Order.ARRIVAL:
            words += ["--utility", self.utility.value, "--drop", self.drop.value, "--patience-s", str(self.patience_s)]
        return words if self.eta_percent is None else [*words, "--eta-percent", str(self.eta_percent)]


def choices(
    orders: tuple[Order, ...], *, utility: Utility, drop: Drop, etas: tuple[int, ...], patience_s: int
) -> list[OrderChoice]:
    """Return each order once, and order deadline once for each eta. Args: etas: in percent; none: the default."""
    controls = {order: etas if order is Order.DEADLINE and etas else (None,) for order in orders}
    return [
        OrderChoice(order=order, utility=utility, drop=drop, eta_percent=eta, patience_s=patience_s)
        for order in orders
        for eta in controls[order]
    ]
