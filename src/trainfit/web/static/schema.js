// What the recipe's JSON schema says of a field, in the terms of controls.

export class Schema {
  constructor(root) {
    this.root = root;
  }

  // A node without references; what stands beside a reference (default, description) is kept.
  resolved(node) {
    if (!node?.$ref) return node;
    const { $ref, ...own } = node;
    const found = this.resolved(this.root.$defs[$ref.replace("#/$defs/", "")]);
    return { ...found, ...own, description: own.description ?? found.description };
  }

  // The node of a dotted path, through the objects of unions.
  at(path) {
    let nodes = [this.root];
    for (const name of path.split(".")) {
      nodes = nodes.flatMap(node => this.kinds(node)).map(kind => kind.node.properties?.[name]).filter(Boolean);
    }
    return nodes.length ? this.resolved(nodes[0]) : null;
  }

  // The kinds of value that a node takes, unions opened: {type, node}, `null` among them.
  kinds(node) {
    const found = this.resolved(node);
    const parts = found.anyOf ?? found.oneOf;
    if (parts) return parts.flatMap(part => this.kinds(part));
    if (found.enum || "const" in found) return [{ type: "enum", node: found, values: found.enum ?? [found.const] }];
    if (found.type === "object" && found.properties) return [{ type: "object", node: found }];
    return [{ type: found.type === "object" || !found.type ? "json" : found.type, node: found }];
  }

  default(path) {
    return this.at(path)?.default;
  }
}

export const titled = node => (node.title ?? "").replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();

// Whether a value is of a kind.
export function isOf(kind, value) {
  if (kind.type === "enum") return kind.values.some(one => JSON.stringify(one) === JSON.stringify(value));
  if (kind.type === "null") return value === null;
  if (kind.type === "array") return Array.isArray(value);
  if (kind.type === "json") return true;
  if (kind.type === "object") {
    if (value === null || typeof value !== "object" || Array.isArray(value)) return false;
    const known = kind.node.properties;
    return Object.entries(value).every(([name, one]) => name in known && (!("const" in known[name]) || known[name].const === one) && (!known[name].enum || known[name].enum.includes(one)))
      && (kind.node.required ?? []).every(name => name in value);
  }
  if (kind.type === "integer" || kind.type === "number") return typeof value === "number";
  return typeof value === kind.type;
}
