//! Settings that stand beside their defaults, in the syntax of Rust's RFC 3681: `name: Type = default`.

/// A struct of settings that are read from a recipe: what is not given has its default, an unknown key is an error.
macro_rules! with_defaults {
    ($(#[$of_struct:meta])* $vis:vis struct $name:ident {
        $($(#[$of_field:meta])* $field_vis:vis $field:ident: $kind:ty = $default:expr,)*
    }) => {
        $(#[$of_struct])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        $vis struct $name {
            $($(#[$of_field])* $field_vis $field: $kind,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default,)* }
            }
        }
    };
}
