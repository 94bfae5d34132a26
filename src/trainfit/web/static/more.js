// What some recipes have beside a step: the loop of a policy, the stages of a pipeline, collectives.

import { h, table } from "./dom.js";
import { bytes, gib, percent, seconds, whole } from "./format.js";

export function more(estimate) {
  return [loop(estimate.loop), pipeline(estimate), traffic(estimate)];
}

function loop(found) {
  if (!found) return null;
  const memory = found.memory.map(one => [one.phase, bytes(one.peak_allocated_bytes), bytes(one.peak_reserved_bytes), one.peak_device_bytes ? bytes(one.peak_device_bytes) : "–"]);
  const time = found.expected ?? found.longest;
  const parts = (time?.parts ?? []).map(one => [one.name, whole(one.calls), seconds(one.seconds), percent(one.seconds / time.seconds, 0), whole(one.tokens), percent(one.mfu)]);
  return h("section", {}, h("h2", {}, "The loop: rollout, scoring and update"),
    time ? h("p", { class: "note" }, `${seconds(time.seconds)} a loop of ${whole(found.completions)} completions, ${time.lengths}; the figures above are of its highest memory and of one update.`) : null,
    h("div", { class: "columns" }, table("Memory of the loop by phase", [["phase", ""], ["allocated", "number"], ["reserved", "number"], ["on the device", "number"]], memory),
      parts.length ? table("Time of the loop by part", [["part", ""], ["calls", "number"], ["time", "number"], ["share", "number"], ["tokens", "number"], ["MFU", "number"]], parts) : null),
    found.levers.length ? table("What moving would give", [["moved off the GPU", ""], ["during", ""], ["lowers the peak by", "number"], ["copies in each loop", "number"]],
      found.levers.map(one => [one.moved, one.during, bytes(one.lower_bytes), seconds(one.seconds)])) : null);
}

function pipeline({ pipeline: stages, bubble }) {
  if (!stages.length) return null;
  const blocks = one => one.blocks.map(([first, last]) => (first === last ? `${first}` : `${first} to ${last}`)).join(", ");
  return h("section", {}, h("h2", {}, "The pipeline"), bubble ? h("p", { class: "note" }, `GPUs wait ${percent(bubble)} of the time for other stages, on average.`) : null,
    table("The pipeline's GPUs", [["GPU", ""], ["blocks", ""], ["in flight", "number"], ["GiB", "number"], ["forward", "number"], ["backward", "number"], ["idle in a step", "number"]],
      stages.map((one, at) => [`${at + 1}`, blocks(one), whole(one.in_flight), gib(one.peak_device_bytes), seconds(one.forward_s), seconds(one.backward_s), seconds(one.idle_s)])));
}

function traffic({ traffic: found }) {
  if (!found.length) return null;
  return h("section", {}, h("h2", {}, "Collectives of a step, of one GPU"), table("Collectives of a step", [["kind", ""], ["ranks", "number"], ["between hosts", ""], ["calls", "number"], ["sent", "number"]],
    found.map(one => [one.kind.replaceAll("_", "-"), whole(one.num_ranks), one.between_hosts ? "yes" : "no", whole(one.calls), bytes(one.bytes_sent)])));
}
