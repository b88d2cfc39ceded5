// What is known of the agents: the fields of their cards, and their traffic of the last minutes.

/** One agent. It has the fields of its card as the hub sends them, and counts for each slot of the last minutes. */
class Agent {
  version = 0; // grows with each change
  gone = false;
  until = 0; // when its wait is over, on the page's clock

  constructor(name, slots) {
    this.agent_id = name;
    this.passed = new Uint32Array(slots);
    this.denied = new Uint32Array(slots);
  }

  /** Apply changed fields, and slots of the spark. */
  update({ spark = [], ...fields }) {
    Object.assign(this, fields);
    for (const [at, passed, denied] of spark) {
      this.passed[at % this.passed.length] = passed;
      this.denied[at % this.passed.length] = denied;
    }
    if ("wait_left_ms" in fields) this.until = performance.now() + fields.wait_left_ms;
    this.version++;
  }

  /** Whole seconds that are left of its wait. */
  get wait() {
    return this.rate_limited ? Math.max(Math.ceil((this.until - performance.now()) / 1000), 0) : 0;
  }
}

/** All agents that the hub has sent. */
export class Agents {
  #agents = new Map(); // by name
  #awaited = 0; // agents that follow a snapshot
  #before = new Set(); // names from before the snapshot that have not come again
  slot = 0;
  slots = 60;
  seconds = 5; // of a slot
  more = 0; // agents that the hub has not sent
  admin = false;

  get size() {
    return this.#agents.size;
  }

  all() {
    return this.#agents.values();
  }

  get(name) {
    return this.#agents.get(name);
  }

  /** Start again from a snapshot, which updates may follow with more agents. Agents that stay are the same objects. */
  load({ admin, agent_slots, slot_seconds, slot, summary, agents, more }) {
    if (agent_slots !== this.slots) this.#agents.clear();
    [this.admin, this.slots, this.seconds] = [admin, agent_slots, slot_seconds];
    for (const agent of this.#agents.values()) {
      agent.passed.fill(0);
      agent.denied.fill(0);
    }
    this.#before = new Set(this.#agents.keys());
    this.#awaited = summary.agents - more;
    this.update({ slot, agents, more });
  }

  /** Apply an update. */
  update({ slot, agents = [], gone = [], more = this.more }) {
    this.more = more;
    if (slot !== this.slot) this.#advance(slot);
    this.#remove(gone);
    for (const fields of agents) {
      const name = fields.agent_id;
      let agent = this.#agents.get(name);
      if (!agent) this.#agents.set(name, (agent = new Agent(name, this.slots)));
      agent.update(fields);
      this.#before.delete(name);
    }
    if (this.#before.size && this.#agents.size - this.#before.size >= this.#awaited) {
      this.#remove(this.#before);
      this.#before = new Set();
    }
  }

  #remove(names) {
    for (const name of names) {
      const agent = this.#agents.get(name);
      if (!agent) continue;
      agent.gone = true;
      agent.version++;
      this.#agents.delete(name);
    }
  }

  /** Clear the slots that are new. */
  #advance(slot) {
    const first = Math.max(this.slot + 1, slot - this.slots + 1);
    for (const { passed, denied } of this.#agents.values()) {
      for (let at = first; at <= slot; at++) passed[at % this.slots] = denied[at % this.slots] = 0;
    }
    this.slot = slot;
  }

  /** Where the counts of a place are: the newest place is `slots - 1`. */
  at(place) {
    return (this.slot + 1 + place) % this.slots;
  }

  /** Requests of an agent per second, over the last minute. */
  rate(agent) {
    const many = Math.round(60 / this.seconds);
    let sum = 0;
    for (let place = this.slots - many; place < this.slots; place++) {
      const at = this.at(place);
      sum += agent.passed[at] + agent.denied[at];
    }
    return sum / 60;
  }

  /** The most requests of any agent in a slot: the sparks of all agents have this scale. */
  most() {
    let most = 0;
    for (const { passed, denied } of this.#agents.values()) {
      for (let at = 0; at < passed.length; at++) if (passed[at] + denied[at] > most) most = passed[at] + denied[at];
    }
    return most;
  }
}
